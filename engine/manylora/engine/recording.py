"""The lines of a recorded step trace: what the scheduler was told and what it did. Holds no text.

JSON, the header first, then in the order in which the engine took them. Times are seconds of the
machine's monotonic clock. Neither text nor token ids are in it: a full block of tokens is known by
8 bytes that are equal where one request could use the other's KV, and that say nothing else.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from manylora.engine.api import AdapterRef, EngineInfo, FinishReason, Request, SamplingParams
from manylora.engine.blocks import BlockPool
from manylora.engine.errors import EngineError, RecordingError
from manylora.engine.lifecycle import WaitCause
from manylora.engine.policy import POLICIES
from manylora.engine.scheduler import Scheduler
from manylora.engine.slots import AdapterSlots

FORMAT = 1
IDENTITY_BYTES = 8
MAX_SIZE = 1 << 24  # of blocks, seats, tokens: no machine has more, and a damaged number might
_SIZES = ("block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "max_loras")


class Line(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="line"
):
    """One line of the file."""


def _check_size(name: str, value: int) -> None:
    if not 1 <= value <= MAX_SIZE:
        raise ValueError(f"{name} {value} is not between 1 and {MAX_SIZE}")


class Header(Line, frozen=True, tag="header", kw_only=True):
    """The engine, and every option that its scheduler has; their names are `EngineConfig`'s."""

    format: int = FORMAT
    at: float  # the monotonic clock's time,
    unix_seconds: float  # and the wall clock's at the same moment
    engine: EngineInfo
    scheduling_policy: str
    enable_prefix_caching: bool
    share_base_prefixes: bool
    long_prefill_token_threshold: int

    def __post_init__(self) -> None:
        for name in _SIZES:
            _check_size(name, getattr(self.engine, name))

    def scheduler(
        self,
        *,
        adapter_ready: Callable[[str], bool],
        cache_secret: bytes = b"",
        prefix_caching: bool | None = None,
    ) -> Scheduler:
        """A scheduler with these options, or with another prefix caching.

        Args:
            adapter_ready, cache_secret: as `Scheduler` takes them.
        """
        engine = self.engine
        caching = self.enable_prefix_caching if prefix_caching is None else prefix_caching
        blocks = BlockPool(engine.num_kv_blocks, engine.block_size, prefix_caching=caching)
        return Scheduler(
            blocks,
            AdapterSlots(engine.max_loras),
            policy=POLICIES[self.scheduling_policy](),
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            base_digest=engine.model_digest,
            kv_dtype=engine.dtype,
            cache_secret=cache_secret,
            share_base_prefixes=self.share_base_prefixes,
            adapter_ready=adapter_ready,
        )


class Added(Line, frozen=True, tag="added", kw_only=True):
    """A request joined the queue."""

    request_id: str
    at: float
    tenant: str
    adapter: str | None = None  # its digest; None for the base
    prompt_tokens: int
    max_tokens: int
    weight: float = 1.0
    priority: int = 0
    salted: bool = False  # with a cache salt of its client
    # Its prompt's are wanted: it looks for no prefix until they are told.
    prompt_logprobs: bool = False
    blocks: tuple[bytes, ...] = ()  # identities of the prompt's full blocks

    def __post_init__(self) -> None:
        _check_size("prompt_tokens", self.prompt_tokens)
        _check_size("max_tokens", self.max_tokens)

    def request(self) -> Request:
        """The same to the scheduler; its tokens are no tokens."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=(0,) * self.prompt_tokens,
            params=SamplingParams(
                max_tokens=self.max_tokens, prompt_logprobs=0 if self.prompt_logprobs else None
            ),
            tenant=self.tenant,
            adapter=None if self.adapter is None else AdapterRef(self.adapter),
            weight=self.weight,
            priority=self.priority,
        )


class Removed(Line, frozen=True, tag="removed"):
    """A request left: its answer was complete, or it was aborted or given up."""

    request_id: str
    at: float
    reason: FinishReason
    output_tokens: int


class AdapterReady(Line, frozen=True, tag="adapter_ready"):
    """An adapter's weights are in host memory."""

    digest: str
    at: float


class AdapterGone(Line, frozen=True, tag="adapter_gone"):
    """An adapter's weights have left host memory."""

    digest: str
    at: float


class SlotEmptied(Line, frozen=True, tag="slot_emptied"):
    """An adapter that nobody may use any more has left its slot."""

    slot: int
    digest: str
    at: float


class PrefixForgotten(Line, frozen=True, tag="prefix_forgotten"):
    """The blocks of a request whose numbers went wrong are found no more."""

    request_id: str
    at: float


class RowsRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The rows of one sequence in one forward call."""

    request_id: str
    first_position: int
    num_tokens: int
    slot: int | None  # of its adapter


class PreemptedRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that gave back all it held."""

    request_id: str
    blocks_short: int  # 0: it gave its place to another tenant's


class StartedRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that was admitted, for the first time or again."""

    request_id: str
    found_tokens: int  # in the prefix cache, now
    cached_tokens: int  # of its prompt, by its tenant's own computing, at its first start


class StepRecord(
    msgspec.Struct,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="line",
    tag="step",
    kw_only=True,
):
    """One forward call; a line too, that is complete when the call has ended."""

    step: int
    at: float  # when it began
    seconds: float | None = None  # how long it took; None: it failed
    rows: tuple[RowsRecord, ...]
    fills: tuple[tuple[int, str], ...] = ()  # (slot, digest) loaded before the call
    preempted: tuple[PreemptedRecord, ...] = ()
    started: tuple[StartedRecord, ...] = ()
    evicted_blocks: int = 0  # cached blocks given to somebody else
    kv_blocks_used: int = 0
    running: int = 0  # sequences, after it was scheduled, as the next
    waiting: Mapping[WaitCause, int] = {}
    # Identities of the output blocks that are full after it, by request id.
    blocks: Mapping[str, tuple[bytes, ...]] = {}

    @property
    def num_tokens(self) -> int:
        return sum(rows.num_tokens for rows in self.rows)


Event = Added | Removed | AdapterReady | AdapterGone | SlotEmptied | PrefixForgotten | StepRecord
_decoder = msgspec.json.Decoder(Header | Event)


class _AnyLine(msgspec.Struct):
    line: str


_tag_decoder = msgspec.json.Decoder(_AnyLine)


class Recording:
    """A file of such lines. What was cut off in the middle of its last line ends before it."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            RecordingError: it cannot be read, or is no recording of this format.
        """
        self.path = path
        self.is_torn = False  # known when all lines have been read
        first = next(self._lines(), None)
        if first is None or not isinstance(first[1], Header):
            raise self._no_trace()
        self.header = first[1]
        if self.header.format != FORMAT:
            raise RecordingError(
                f"{path}: line 1: its format is {self.header.format}, not {FORMAT}"
            )
        if self.header.scheduling_policy not in POLICIES:
            raise RecordingError(f"{path}: line 1: no such policy")

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        """The lines after the header, with their numbers.

        Raises:
            RecordingError: a line cannot be read; its number is said.
        """
        for number, line in self._lines():
            if isinstance(line, Header) != (number == 1):
                raise self.error(number, "a header in the middle")
            if not isinstance(line, Header):
                yield number, line

    def error(self, number: int, reason: object) -> RecordingError:
        """What is wrong with a line."""
        return RecordingError(f"{self.path}: line {number}: {reason}")

    def _lines(self) -> Iterator[tuple[int, Header | Event]]:
        try:
            with self.path.open("rb") as file:
                for number, text in enumerate(file, start=1):
                    if not text.endswith(b"\n"):
                        self.is_torn = True
                        return
                    yield number, self._decode(number, text)
        except OSError as error:
            raise RecordingError(f"cannot read {self.path}: {error.strerror}") from error

    def _decode(self, number: int, text: bytes) -> Header | Event:
        try:
            return _decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, EngineError) as error:
            if number == 1 and not _is_header(text):
                raise self._no_trace() from error
            raise self.error(number, error) from error

    def _no_trace(self) -> RecordingError:
        return RecordingError(f"{self.path} is not a step trace: line 1 is not the header of one")


def _is_header(text: bytes) -> bool:
    """Whether it is one at all, perhaps of another version."""
    try:
        return _tag_decoder.decode(text).line == "header"
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
