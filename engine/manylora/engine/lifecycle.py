"""A request's life: its stages, the module that does each, and why it waits in between.

Standard library only.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class WaitCause(StrEnum):
    """Why a request does not run: what the last step lacked for it."""

    STEP = "step"  # from its arrival until the next step is chosen
    ADAPTER_LOAD = "adapter_load"  # its adapter is on its way into host memory
    ADAPTER_SLOT = "adapter_slot"  # running sequences hold every slot with other adapters
    KV_BLOCKS = "kv_blocks"  # free ones now, or those that the running are expected to want
    TOKEN_BUDGET = "token_budget"  # max_num_batched_tokens
    SEQUENCE_LIMIT = "sequence_limit"  # max_num_seqs
    FAIRNESS = "fairness"  # a later request of another tenant goes first, by the policy
    GRAMMAR = "grammar"  # its grammar is being compiled
    PREEMPTED = "preempted"  # it gave its KV blocks back and has not resumed


class StageName(StrEnum):
    """The moments of a request's life, from the HTTP request to the last byte."""

    RECEIVED = "received"
    TOKENISED = "tokenised"
    QUEUED = "queued"
    ADAPTER_READY = "adapter_ready"
    SCHEDULED = "scheduled"  # for the first time
    PREFILL_CHUNK = "prefill_chunk"  # computed; with the number of its tokens
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    LAST_TOKEN = "last_token"
    DETOKENISED = "detokenised"
    SENT = "sent"


@dataclass(frozen=True, slots=True)
class Stage:
    """One moment of a request's life and the module that brought it about."""

    name: StageName
    at: float  # seconds, of this machine's monotonic clock: the same in all its processes
    component: str  # a module's dotted name
    tokens: int = 0


_COMPONENTS = {
    StageName.QUEUED: "manylora.engine.core",
    StageName.ADAPTER_READY: "manylora.engine.adapters",
    StageName.SCHEDULED: "manylora.engine.scheduler",
    StageName.PREFILL_CHUNK: "manylora.engine.runner",
    StageName.FIRST_TOKEN: "manylora.engine.sampler",
    StageName.PREEMPTED: "manylora.engine.scheduler",
    StageName.RESUMED: "manylora.engine.scheduler",
    StageName.LAST_TOKEN: "manylora.engine.sampler",
    StageName.DETOKENISED: "manylora.engine.outputs",
}
"""Who does what in the engine process."""


@dataclass(eq=False, slots=True)
class Life:
    """The stages of one request in the engine so far, and its waits by cause. Times in seconds."""

    stages: list[Stage] = field(default_factory=list)
    waited: dict[WaitCause, float] = field(default_factory=dict)
    cause: WaitCause | None = None  # of the wait that goes on now
    _since: float = 0.0
    _num_told: int = 0

    def stamp(self, name: StageName, now: float, tokens: int = 0) -> None:
        self.stages.append(Stage(name, now, _COMPONENTS[name], tokens))

    def time_of(self, name: StageName) -> float | None:
        """When a stage was first reached."""
        return next((stage.at for stage in self.stages if stage.name is name), None)

    def waited_until(self, now: float) -> dict[WaitCause, float]:
        """The waits by cause, the one that goes on now included."""
        if self.cause is None:
            return dict(self.waited)
        return self.waited | {self.cause: self.waited.get(self.cause, 0.0) + now - self._since}

    def untold(self) -> tuple[Stage, ...]:
        """The stages since this was last asked."""
        told, self._num_told = self._num_told, len(self.stages)
        return tuple(self.stages[told:])

    def wait(self, cause: WaitCause | None, now: float) -> None:
        """From now on it waits for `cause`, or runs; the time until now goes to the one before."""
        if self.cause is not None:
            self.waited[self.cause] = self.waited.get(self.cause, 0.0) + now - self._since
        self.cause, self._since = cause, now
