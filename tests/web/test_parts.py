"""The small parts that pages are made of."""

import re

import pytest

from manylora.platform.ids import now_us
from manylora.web.charts import HEIGHT, bars
from manylora.web.templating import _ago, _duration, _latency, _sentence, _size
from manylora.web.throttle import MAX_FAILURES_OF_ADDRESS, SignInThrottle


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_address_waits_out_the_window_after_ten_failures_for_one_name():
    clock = Clock()
    throttle = SignInThrottle(clock)

    for _ in range(10):
        assert throttle.wait_seconds("1.2.3.4", "ada") == 0
        throttle.failed("1.2.3.4", "ada")
        clock.now += 1

    assert throttle.wait_seconds("1.2.3.4", "ada") == 290
    assert throttle.wait_seconds("1.2.3.4", "bob") == 0
    assert throttle.wait_seconds("5.6.7.8", "ada") == 0
    clock.now += 290
    assert throttle.wait_seconds("1.2.3.4", "ada") == 0


def test_an_address_that_tries_many_names_waits_for_all_of_them():
    throttle = SignInThrottle(Clock())

    for number in range(MAX_FAILURES_OF_ADDRESS):
        throttle.failed("1.2.3.4", f"name{number}")

    assert throttle.wait_seconds("1.2.3.4", "another") > 0
    assert throttle.wait_seconds("5.6.7.8", "another") == 0


def test_what_is_remembered_of_failures_stays_bounded(monkeypatch):
    monkeypatch.setattr("manylora.web.throttle.MAX_TRACKED", 100)
    clock = Clock()
    throttle = SignInThrottle(clock)

    for number in range(1000):
        throttle.failed(f"address{number}", "ada")
        clock.now += 10

    assert len(throttle._failures) <= 102


def test_bars_are_as_high_as_their_values():
    svg = str(bars([0, 50, 100], ["07:00", "08:00", "<09:00>"], title="Tokens & more"))

    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', svg)]
    assert heights == [1, HEIGHT / 2, HEIGHT]
    assert "<title>Tokens &amp; more</title>" in svg
    assert "Highest: 100. All together: 150." in svg
    assert "&lt;09:00&gt;: 100" in svg


def test_no_values_make_no_bars():
    assert "<rect" not in bars([], [], title="Nothing")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (0.9, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_durations_are_said_in_their_largest_unit(seconds, said):
    assert _duration(seconds) == said


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (5 << 40, "5 TiB")],
)
def test_sizes_are_said_in_binary_units(num_bytes, said):
    assert _size(num_bytes) == said


@pytest.mark.parametrize(
    ("microseconds", "said"), [(0, "0 ms"), (259_700, "260 ms"), (7_222_354, "7.2 s")]
)
def test_latencies_are_said_in_milliseconds_below_a_second(microseconds, said):
    assert _latency(microseconds) == said


def test_a_time_is_said_relative_to_now_with_the_exact_one_beside():
    assert "never" in _ago(None)
    assert ">3 min ago<" in _ago(now_us() - 200_000_000)
    assert ">in 1 h<" in _ago(now_us() + 3_700_000_000)
    assert 'title="1970-01-01 00:00:01 UTC"' in _ago(1_000_000)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("name must be short", "Name must be short."),
        ("q_proj is missing", "q_proj is missing."),
        ("Done!", "Done!"),
    ],
)
def test_a_message_becomes_a_sentence_but_a_name_stays_as_it_is(message, said):
    assert _sentence(message) == said
