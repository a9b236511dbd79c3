"""One request as the engine sees it: the only thing in the engine that changes."""

from dataclasses import dataclass, field
from enum import StrEnum

from manylora.engine.api import FinishReason, Request, TokenLogprob
from manylora.engine.lifecycle import Life, StageName, WaitCause
from manylora.engine.text.detokenizer import Detokenizer
from manylora.engine.text.processor import TextProcessor
from manylora.engine.text.stops import StopMatcher

YIELD_PROGRESS = 8  # times what was computed in vain the time before


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
    seed: int = 0  # the request's, or one of its own
    detokenizer: Detokenizer | None = None
    stops: StopMatcher | None = None

    status: SequenceStatus = SequenceStatus.WAITING
    order: int = 0  # its place among all arrivals
    arrival_step: int = 0  # steps taken before it came
    num_computed_tokens: int = 0
    # Prompt tokens found in the prefix cache at first admission, of its tenant's own computing.
    num_cached_tokens: int = 0
    num_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache at first admission
    num_found_tokens: int = 0  # and found, whoever computed them
    num_reused_tokens: int = 0  # found in the prefix cache at its latest start
    num_wasted_tokens: int = 0  # computed since the start before, when it last gave way
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks hashed so far
    slot: int | None = None  # the adapter slot held while running
    num_passes: int = 0  # steps in which its turn came and other adapters held every slot
    wait_cause: WaitCause = WaitCause.STEP  # while it waits: what it lacked in the latest step
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on

    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_preemptions: int = 0
    num_once_computed: int = 0  # the most that were computed when it was preempted
    life: Life = field(default_factory=Life)

    @classmethod
    def begin(
        cls, request: Request, text: TextProcessor, *, seed: int, arrival_step: int
    ) -> "Sequence":
        """A request's sequence before its first step."""
        params, tokens = request.params, request.prompt_token_ids
        detokenizer = stops = None
        if text.has_tokenizer:
            skip = params.skip_special_tokens
            detokenizer = text.detokenizer(tokens, skip_special_tokens=skip)
        if params.stop:
            stops = StopMatcher(params.stop, shown=params.include_stop_str_in_output)
        return cls(
            request=request,
            token_ids=list(tokens),
            seed=seed,
            detokenizer=detokenizer,
            stops=stops,
            arrival_step=arrival_step,
        )

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
    def num_tokens_left(self) -> int:
        """Known tokens that are not computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def may_yield(self) -> bool:
        """Whether it has computed enough since its latest start to give way again for another.

        So the work that is done twice stays a fraction of all, and who gives way gets on.
        """
        return self.progress >= YIELD_PROGRESS * self.num_wasted_tokens

    @property
    def progress(self) -> int:
        """Tokens computed since its latest start."""
        return self.num_computed_tokens - self.num_reused_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is to compute."""
        return len(self.token_ids) - self.num_computed_tokens > 1

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted that are not computed yet."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def digest(self) -> str | None:
        """The adapter's digest; None for the base."""
        return self.request.adapter.digest if self.request.adapter else None

    def note_wait(self, cause: WaitCause | None, now: float) -> None:
        """From now on it waits for `cause`, or runs; its adapter may just have come."""
        had_no_adapter = self.life.cause in (WaitCause.STEP, WaitCause.ADAPTER_LOAD)
        if self.digest is not None and had_no_adapter and cause is not WaitCause.ADAPTER_LOAD:
            self.life.stamp(StageName.ADAPTER_READY, now)
        self.life.wait(cause, now)

    def finish(self, reason: FinishReason, *, error: str | None = None) -> None:
        self.finish_reason = reason
        self.error = error
        self.status = SequenceStatus.FINISHED
