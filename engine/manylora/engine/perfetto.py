"""A recorded step trace as a Chrome trace, for https://ui.perfetto.dev: a track a request.

Format: "Trace Event Format", Google 2016. Times in it are whole microseconds from the recording's
start. Process 1 is the engine; each further one is a tenant, whose threads are its requests.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.engine.recording import (
    Added,
    Event,
    Header,
    Recording,
    Removed,
    RowsRecord,
    StepRecord,
)
from manylora.engine.schedule import is_prefill

ENGINE, STEPS = 1, 1  # process and thread of the steps

TraceEvent = dict[str, Any]


def write_perfetto(recording: Path, out: Path) -> int:
    """Write the recording's trace; how many events it has.

    Raises:
        RecordingError: a line cannot be read.
        OSError: the file cannot be written.
    """
    count = 0
    with out.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for event in trace_events(Recording(recording)):
            file.write((",\n" if count else "\n") + json.dumps(event))
            count += 1
        file.write("\n]}\n")
    return count


def trace_events(recording: Recording) -> Iterator[TraceEvent]:
    """The events of a recording; those of a track in the order of their times."""
    return _Tracks(recording.header).events(recording)


@dataclass(slots=True)
class _Track:
    """A request's track; `gap` is the name of the wait that began at `since`, if it waits."""

    process: int
    thread: int
    prompt_tokens: int
    since: int
    gap: str | None = "waiting"


class _Tracks:
    def __init__(self, header: Header) -> None:
        self._start = header.at
        self._name = f"engine {header.engine.model}"
        self._tenants: dict[str, int] = {}  # process by tenant
        self._requests: dict[str, _Track] = {}
        self._num_requests = 0
        self._causes: dict[str, int] = {}  # all seen so far: a counter's series must not stop

    def events(self, recording: Recording) -> Iterator[TraceEvent]:
        yield _named("process_name", self._name, ENGINE, 0)
        yield _named("thread_name", "steps", ENGINE, STEPS)
        for number, event in recording:
            try:
                yield from self._events(event)
            except KeyError as error:
                raise recording.error(number, f"request {error} is not there") from error

    def _events(self, event: Event) -> Iterator[TraceEvent]:
        match event:
            case Added():
                yield from self._add(event)
            case StepRecord():
                yield from self._step(event)
                yield from self._counters(event)
            case Removed():
                yield from self._remove(event)

    def _add(self, event: Added) -> Iterator[TraceEvent]:
        if event.tenant not in self._tenants:
            process = self._tenants[event.tenant] = ENGINE + 1 + len(self._tenants)
            yield _named("process_name", f"tenant {event.tenant}", process, 0)
        self._num_requests += 1
        track = _Track(
            self._tenants[event.tenant],
            STEPS + self._num_requests,
            event.prompt_tokens,
            self._microseconds(event.at),
        )
        self._requests[event.request_id] = track
        yield _named("thread_name", event.request_id, track.process, track.thread)

    def _step(self, step: StepRecord) -> Iterator[TraceEvent]:
        began = self._microseconds(step.at)
        ended = self._microseconds(step.at + (step.seconds or 0.0))
        facts = {
            "step": step.step,
            "tokens": step.num_tokens,
            "rows": len(step.rows),
            "fills": [list(fill) for fill in step.fills],
            "preempted": [preempted.request_id for preempted in step.preempted],
            "evicted_blocks": step.evicted_blocks,
        }
        yield _slice("step", began, ended, ENGINE, STEPS, facts)
        for started in step.started:
            track = self._requests[started.request_id]
            yield from _end_gap(track, began, {"found_tokens": started.found_tokens})
        for preempted in step.preempted:
            track = self._requests[preempted.request_id]
            track.gap, track.since = "preempted", began
        for rows in step.rows:
            yield self._rows(rows, began, ended)

    def _rows(self, rows: RowsRecord, began: int, ended: int) -> TraceEvent:
        track = self._requests[rows.request_id]
        prefills = is_prefill(rows.first_position, rows.num_tokens, track.prompt_tokens)
        facts = {
            "tokens": rows.num_tokens,
            "first_position": rows.first_position,
            "slot": rows.slot,
        }
        name = "prefill" if prefills else "decode"
        return _slice(name, began, ended, track.process, track.thread, facts)

    def _remove(self, event: Removed) -> Iterator[TraceEvent]:
        track, at = self._requests.pop(event.request_id), self._microseconds(event.at)
        yield from _end_gap(track, at, {})
        yield {
            "name": f"end: {event.reason}",
            "cat": "request",
            "ph": "i",
            "ts": at,
            "pid": track.process,
            "tid": track.thread,
            "s": "t",
            "args": {"output_tokens": event.output_tokens},
        }

    def _counters(self, step: StepRecord) -> Iterator[TraceEvent]:
        at = self._microseconds(step.at)
        self._causes = dict.fromkeys(self._causes, 0) | {
            str(cause): count for cause, count in step.waiting.items()
        }
        yield _counter("KV blocks used", at, {"blocks": step.kv_blocks_used})
        yield _counter("running", at, {"sequences": step.running})
        yield _counter("waiting by cause", at, self._causes or {"none": 0})

    def _microseconds(self, at: float) -> int:
        return round((at - self._start) * 1e6)


def _end_gap(track: _Track, until: int, facts: dict[str, Any]) -> Iterator[TraceEvent]:
    if track.gap is not None:
        yield _slice(track.gap, track.since, until, track.process, track.thread, facts)
        track.gap = None


def _slice(
    name: str, began: int, ended: int, process: int, thread: int, facts: dict[str, Any]
) -> TraceEvent:
    return {
        "name": name,
        "cat": "engine" if process == ENGINE else "request",
        "ph": "X",
        "ts": began,
        "dur": ended - began,
        "pid": process,
        "tid": thread,
        "args": facts,
    }


def _counter(name: str, at: int, values: dict[str, int]) -> TraceEvent:
    return {"name": name, "ph": "C", "ts": at, "pid": ENGINE, "tid": 0, "args": values}


def _named(kind: str, name: str, process: int, thread: int) -> TraceEvent:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": {"name": name}}
