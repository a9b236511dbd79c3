"""Which tests run, and what is said of those that did not.

Long tests (`nightly`) are left out unless `-m` asks for them. Elsewhere a test whose program is
missing is skipped with a reason; in continuous integration (`MANYLORA_CI=1`), which installs the
programs, that skip is a failure: a green run means that the browser, PostgreSQL and Prometheus
really ran.
"""

import os
from collections import Counter
from collections.abc import Generator

import pytest

PROVIDED_IN_CI = ("browser", "postgres", "prometheus", "real_model")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" in config.option.markexpr or any("::" in argument for argument in config.args):
        return
    long_tests = [item for item in items if item.get_closest_marker("nightly")]
    if long_tests:
        config.hook.pytest_deselected(items=long_tests)
        items[:] = [item for item in items if item not in long_tests]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    provided = [name for name in PROVIDED_IN_CI if item.get_closest_marker(name)]
    if in_ci() and provided and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{', '.join(provided)} tests must run here; skipped: {reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if in_ci() and report.skipped:  # a module that skips itself hides which markers its tests have
        report.outcome = "failed"
        report.longrepr = f"a whole module may not skip itself here: {reason(report)}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = Counter(reason(report) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section("skipped, and why")
        for why, count in skipped.most_common():
            terminalreporter.line(f"{count:5d}  {why}")


def in_ci() -> bool:
    return os.environ.get("MANYLORA_CI") == "1"


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)
