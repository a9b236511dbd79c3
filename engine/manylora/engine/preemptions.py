"""Says in plain words who was preempted, why, and what would avoid it on this machine."""

from collections import deque
from collections.abc import Iterable
from itertools import islice

import structlog

from manylora.engine.api import EngineInfo, Remedies
from manylora.engine.demand import KEPT_LENGTHS, Demand
from manylora.engine.remedies import Demanded, Knobs, Option, as_options, find_remedies
from manylora.engine.schedule import Preemption
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import Sequence

logger = structlog.get_logger(__name__)

LINE_SECONDS = 1.0  # at most one line of a kind in this time; those between are counted
KNOWN_ENDS = 16  # fewer ends say nothing: then each is expected to use its max_tokens


class PreemptionLog:
    """Counts preemptions, and explains them with the traffic of the recorded window."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._ended: deque[Demanded] = deque(maxlen=KEPT_LENGTHS)
        self._last_line = {True: float("-inf"), False: float("-inf")}  # by: was it a shortage
        self._untold = 0
        self.count = 0
        self.remedies: Remedies | None = None

    def ended(self, sequence: Sequence) -> None:
        """A sequence has left; its lengths stay in the window, if it ever ran."""
        if sequence.num_output_tokens:
            self._ended.append(_demanded(sequence, sequence.num_tokens))

    def tell(self, preemptions: Iterable[Preemption], scheduler: Scheduler, now: float) -> None:
        """Log a line for the first of them, unless one was logged a moment ago."""
        for preemption in preemptions:
            self.count += 1
            was_short = preemption.blocks_short > 0
            if now - self._last_line[was_short] < LINE_SECONDS:
                self._untold += 1
                continue
            self._last_line[was_short] = now
            self._log(preemption, scheduler)
            self._untold = 0

    def _log(self, preemption: Preemption, scheduler: Scheduler) -> None:
        sequence = preemption.sequence
        facts = {
            "request_id": sequence.request_id,
            "tenant": sequence.request.tenant,
            "blocks_short": preemption.blocks_short,
            "times_this_request": sequence.num_preemptions,
            "times_in_all": self.count,
            "untold_before": self._untold,
        }
        if not preemption.blocks_short:
            logger.info("sequence_preempted", explanation=_gave_way(preemption), **facts)
            return
        self.remedies = self._find(scheduler)
        explanation = f"{self._ran_dry(preemption, scheduler)} {self._advice(self.remedies)}"
        logger.warning("sequence_preempted", explanation=explanation, **facts)

    def _find(self, scheduler: Scheduler) -> Remedies:
        alive = [*scheduler.running, *islice(scheduler.waiting, KEPT_LENGTHS)]
        window = [*self._ended, *(_expected(s, scheduler.demand) for s in alive)]
        held = sum(len(s.block_table) for s in scheduler.running)
        info = self._info
        knobs = Knobs(
            num_kv_blocks=info.num_kv_blocks,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
        )
        shared = min(1.0, scheduler.blocks.num_used / held) if held else 1.0
        return find_remedies(window, knobs, shared=shared)

    def _ran_dry(self, preemption: Preemption, scheduler: Scheduler) -> str:
        sequence = preemption.sequence
        return (
            f"Request {sequence.request_id} of tenant {sequence.request.tenant} gave its KV blocks "
            f"back and waits at the front of the queue; up to {preemption.num_lost_tokens} tokens "
            f"of it are computed once more: a running sequence was short of "
            f"{_count(preemption.blocks_short, 'block')} of the {self._info.num_kv_blocks}, with "
            f"{_count(len(scheduler.running), 'sequence')} still running. It is this request's "
            f"preemption number {sequence.num_preemptions}, the engine's number {self.count}."
        )

    def _advice(self, found: Remedies) -> str:
        """The four remedies, each with the value that the recorded window asks for."""
        *alone, dtype, length = as_options(found, self._info)
        numbered = "; ".join(f"({n}) {_told(option)}" for n, option in enumerate(alone, 1))
        less_kv = [
            f"{way.option} {way.value} (now {way.now})"
            for way in (dtype, length)
            if way.value is not None
        ]
        return (
            f"Any one of these would have spared the recorded window its preemptions: {numbered}; "
            f"(4) {dtype.remedy}: {' or '.join(less_kv) or 'no option reaches that'}."
        )


def _gave_way(preemption: Preemption) -> str:
    sequence = preemption.sequence
    return (
        f"Request {sequence.request_id} of tenant {sequence.request.tenant} gave its place to one "
        f"of tenant {preemption.for_tenant}, which the scheduling policy puts first."
    )


def _told(remedy: Option) -> str:
    if remedy.value is None:
        value = f"no value of {remedy.option} helps"
    else:
        value = f"{remedy.option} {remedy.value}"
    return f"{remedy.remedy}: {value} (now {remedy.now})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _demanded(sequence: Sequence, num_tokens: int) -> Demanded:
    return Demanded(sequence.order, sequence.arrival_step, sequence.num_prompt_tokens, num_tokens)


def _expected(sequence: Sequence, demand: Demand) -> Demanded:
    """With the tokens that a sequence will have at its end, as far as can be known."""
    if demand.num_known < KNOWN_ENDS:
        return _demanded(sequence, sequence.num_prompt_tokens + sequence.request.params.max_tokens)
    return _demanded(sequence, sequence.num_tokens + demand.expect_left(sequence))
