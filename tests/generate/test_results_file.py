"""The output file: whole lines only, each input line once, and nobody else's file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manylora.engine.errors import InvalidRequestError
from manylora.generate.input_lines import read_lines
from manylora.generate.results_file import FLUSH_LINES, FinishedLines, ResultsFile
from manylora.generate.resume import Resume
from manylora.platform.settings import SettingsError

OPTIONS = b"options"
SOURCE, OUTPUT = Path("in.jsonl"), Path("out.jsonl")


@pytest.fixture(autouse=True)
def source(folder: Path) -> None:
    SOURCE.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(6)))


def opened() -> ResultsFile:
    return ResultsFile(OUTPUT, most_lines=SOURCE.stat().st_size)


def count_unfinished(results: ResultsFile, options: bytes = OPTIONS) -> int:
    resume = Resume(source=SOURCE, results=results, options=options, adapter_digest=no_adapter)
    return resume.count_unfinished()


def no_adapter(name: str) -> str:
    raise InvalidRequestError(f"no adapter {name}")


def answer(results: ResultsFile, *indices: int, **more: Any) -> None:
    lines = {line.index: line for line in read_lines(SOURCE)}
    for index in indices:
        digest = lines[index].digest(OPTIONS).hex()
        results.append({"index": index, "text": "é\n", "digest": digest, **more})


def written() -> list[int]:
    return [json.loads(line)["index"] for line in OUTPUT.read_bytes().splitlines()]


def test_lines_are_found_again_and_the_rest_is_counted() -> None:
    with opened() as results:
        answer(results, 3, 0)
        answer(results, 4, error="no")
    with opened() as again:
        assert count_unfinished(again) == 3
        assert [again.finished.get(n) is not None for n in range(8)] == [
            *(True, False, False, True, True, False),
            *(False, False),
        ]
        assert (again.finished.count, again.num_errors) == (3, 1)
    assert written() == [3, 0, 4]


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_off_anywhere_keeps_its_whole_lines(data: st.DataObject) -> None:
    OUTPUT.unlink(missing_ok=True)
    with opened() as results:
        answer(results, 3, 0, 5)
    whole = OUTPUT.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    os.truncate(OUTPUT, cut)

    with opened() as results:
        kept = results.finished.count
        answer(results, *[n for n in range(6) if results.finished.get(n) is None])

    assert kept == whole[:cut].count(b"\n")
    assert sorted(written()) == list(range(6))
    assert OUTPUT.read_bytes().startswith(whole[: whole[:cut].rfind(b"\n") + 1])


def test_lines_are_on_the_disk_after_a_small_batch_or_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    SOURCE.write_text("{}\n" * 50)
    with opened() as results:
        answer(results, *range(FLUSH_LINES - 1))
        results.flush_if_due()
        assert OUTPUT.read_bytes() == b""
        answer(results, FLUSH_LINES - 1)
        results.flush_if_due()
        assert len(written()) == FLUSH_LINES
        answer(results, FLUSH_LINES)
        now += 1.5
        results.flush_if_due()
        assert len(written()) == FLUSH_LINES + 1


def test_what_is_pending_is_written_when_the_run_fails() -> None:
    def fail() -> None:
        with opened() as results:
            answer(results, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert written() == [2]


def change_a_line() -> None:
    SOURCE.write_text(SOURCE.read_text().replace('"3"', '"other"'))


def leave_a_line_out() -> None:
    SOURCE.write_text("".join(SOURCE.read_text().splitlines(keepends=True)[:3]))


def put_a_line_in_front() -> None:
    SOURCE.write_text("{}\n" + SOURCE.read_text())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_a_line, r"another line 4 \(index 3\) of in\.jsonl"),
        (leave_a_line_out, "answers lines that in.jsonl no longer has"),
        (put_a_line_in_front, r"another line 1 \(index 0\) of in\.jsonl"),
    ],
)
def test_a_changed_input_is_refused_and_the_line_named(change: Any, said: str) -> None:
    with opened() as results:
        answer(results, 3, 0)
    before = OUTPUT.read_bytes()
    change()

    with opened() as again, pytest.raises(SettingsError, match=said):
        count_unfinished(again)

    assert OUTPUT.read_bytes() == before


def test_other_options_are_refused() -> None:
    with opened() as results:
        answer(results, 0)

    with opened() as again, pytest.raises(SettingsError, match="another model or other options"):
        count_unfinished(again, b"others")


def test_lines_put_behind_the_input_are_only_more_to_do() -> None:
    with opened() as results:
        answer(results, *range(6))
    SOURCE.write_text(SOURCE.read_text() + '{"prompt": "new"}\n')

    with opened() as again:
        assert count_unfinished(again) == 1


@pytest.mark.parametrize(
    "content",
    [
        "rubbish\n",
        '{"prompt": "a"}\n',
        "[]\n",
        '{"index": 0, "digest": "xy"}\n',
        '{"index": 0, "digest": "00"}\n',
        '{"index": "0", "digest": "%s"}\n' % ("ab" * 16),
        '{"index": -1, "digest": "%s"}\n' % ("ab" * 16),
        '{"index": 1000000000000, "digest": "%s"}\n' % ("ab" * 16),
        '{"index": 0, "digest": 5}\n',
    ],
)
def test_a_file_of_something_else_is_left_alone(content: str) -> None:
    OUTPUT.write_text(content + "torn")

    with pytest.raises(SettingsError, match=r"line 1 of out\.jsonl is no answer to this input"):
        opened()

    assert OUTPUT.read_text() == content + "torn"


def test_a_line_answered_twice_is_refused() -> None:
    with opened() as results:
        answer(results, 1, 2, 1)

    with pytest.raises(SettingsError, match=r"line 3 of out\.jsonl answers a line once more"):
        opened()


def test_two_runs_do_not_write_one_file() -> None:
    with opened() as results:
        with pytest.raises(SettingsError, match="another run is writing"):
            opened()
        answer(results, 1)

    assert written() == [1]


@pytest.mark.parametrize("path", ["no/such/folder.jsonl", "."])
def test_a_path_that_cannot_be_written_is_named(path: str) -> None:
    with pytest.raises(SettingsError, match="output: cannot write"):
        ResultsFile(Path(path), most_lines=1)


@given(st.dictionaries(st.integers(0, 300), st.binary(min_size=16, max_size=16).filter(any)))
def test_digests_are_found_by_index(digests: dict[int, bytes]) -> None:
    finished = FinishedLines()
    for index, digest in digests.items():
        finished.add(index, digest)

    assert {n: finished.get(n) for n in range(302)} == {n: digests.get(n) for n in range(302)}
    assert finished.count == len(digests)
