"""One request as the engine sees it: the only thing in the engine that changes."""

from dataclasses import dataclass, field
from enum import StrEnum

from manylora.engine.api import FinishReason, Request
from manylora.engine.text.detokenizer import Detokenizer
from manylora.engine.text.stops import StopMatcher


class SequenceStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """Known tokens, how many of them are computed, and what it holds.

    There is no prefill or decode phase: each step lets `num_computed_tokens` catch up with
    `num_tokens`.
    """

    request: Request
    token_ids: list[int]  # prompt, then output
    arrival_time: float  # seconds, the engine's clock
    seed: int = 0  # the request's, or one of its own
    detokenizer: Detokenizer | None = None
    stops: StopMatcher | None = None

    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks hashed so far
    slot: int | None = None  # the adapter slot held while running
    num_passes: int = 0  # steps in which it could have started but for a slot

    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    num_preemptions: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def digest(self) -> str | None:
        """The adapter's digest; None for the base."""
        return self.request.adapter.digest if self.request.adapter else None

    def finish(self, reason: FinishReason, *, error: str | None = None) -> None:
        self.finish_reason = reason
        self.error = error
        self.status = SequenceStatus.FINISHED
