"""Logs are lines for programs, and an error's line holds no local variables."""

import json
from collections.abc import Iterator

import pytest
import structlog

from manylora.engine.logs import configure_logs


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("terminal", [False, True])
def test_an_error_is_told_without_what_its_variables_held(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    configure_logs("info")

    def fail(prompt: str) -> None:
        raise ZeroDivisionError(str(len(prompt)))

    try:
        fail("SEC" + "RET")
    except ZeroDivisionError as error:
        structlog.get_logger().error("it_broke", exc_info=error)

    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert "SECRET" not in said
    if not terminal:
        assert json.loads(said)["event"] == "it_broke"


def test_less_than_the_level_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("warning")

    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")

    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["loud"]
