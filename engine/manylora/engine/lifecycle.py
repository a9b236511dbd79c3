"""A request's life: its stages, the module that does each, and why it waits in between.

Standard library only.
"""

from dataclasses import dataclass
from enum import StrEnum


class WaitCause(StrEnum):
    """Why a request does not run: what the last step lacked for it."""

    STEP = "step"  # it came while a step was running
    ADAPTER_LOAD = "adapter_load"  # its adapter is on its way into host memory
    ADAPTER_SLOT = "adapter_slot"  # running sequences hold every slot with other adapters
    KV_BLOCKS = "kv_blocks"
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
