"""Fairness between tenants, by the scheduler and block pool that serve; only the model is fake."""

from collections import Counter

import pytest

from manylora.engine.api import FinishReason, Request, SamplingParams
from manylora.engine.blocks import BlockPool
from manylora.engine.errors import InvalidRequestError
from manylora.engine.policy import INPUT_PRICE, OUTPUT_PRICE, FairByTenant, FirstCome, Policy
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import Sequence
from manylora.engine.slots import AdapterSlots

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, BUDGET = 64, 16, 8, 64
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 16
# Theorem 4.4 of the paper: of two tenants that both always have work waiting, neither is ahead by
# more than twice the larger of an input's price and that of all that the KV cache can hold.
BOUND = 2 * max(INPUT_PRICE * PROMPT_TOKENS, OUTPUT_PRICE * NUM_BLOCKS * BLOCK_SIZE)


class Traffic:
    """Steps of the scheduler over requests of several tenants, and the service each has had."""

    def __init__(self, policy: Policy) -> None:
        self.scheduler = Scheduler(
            BlockPool(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=False),
            AdapterSlots(1),
            policy=policy,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=BUDGET,
            base_digest="base",
            kv_dtype="float32",
            adapter_ready=lambda digest: True,
        )
        self.service: Counter[str] = Counter()
        self.num_made = 0

    def send(self, tenant: str, count: int, *, weight: float = 1.0) -> None:
        for _ in range(count):
            self.num_made += 1
            request = Request(
                request_id=str(self.num_made),
                prompt_token_ids=(1,) * PROMPT_TOKENS,
                params=SamplingParams(max_tokens=OUTPUT_TOKENS),
                tenant=tenant,
                weight=weight,
            )
            tokens = list(request.prompt_token_ids)
            self.scheduler.add(Sequence(request=request, token_ids=tokens))

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        sampling = [entry.sequence for entry in batch.entries if entry.samples]
        for entry in batch.entries:
            prompt_left = max(0, PROMPT_TOKENS - entry.sequence.num_computed_tokens)
            tenant = entry.sequence.request.tenant
            self.service[tenant] += INPUT_PRICE * min(prompt_left, entry.num_tokens)
        self.scheduler.advance(batch)
        for sequence in sampling:
            self.service[sequence.request.tenant] += OUTPUT_PRICE
            sequence.token_ids.append(0)
            if sequence.num_output_tokens == OUTPUT_TOKENS:
                sequence.finish(FinishReason.LENGTH)
                self.scheduler.remove(sequence)
        return batch

    def waiting(self, tenant: str) -> int:
        return sum(sequence.request.tenant == tenant for sequence in self.scheduler.waiting)


def largest_lead(policy: Policy, weights: dict[str, float]) -> float:
    """How far service by weight drifts apart, at ten times the requests of one tenant."""
    traffic = Traffic(policy)
    many, few = weights
    traffic.send(many, 4000, weight=weights[many])
    traffic.send(few, 400, weight=weights[few])
    largest = 0.0
    for _ in range(5000):
        traffic.step()
        if not (traffic.waiting(many) and traffic.waiting(few)):
            break
        lead = traffic.service[many] / weights[many] - traffic.service[few] / weights[few]
        largest = max(largest, abs(lead))
    assert sum(traffic.service.values()) > 10 * BOUND  # long enough to drift apart
    return largest


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_ten_times_the_load_gets_no_more_than_its_weight(weight: float) -> None:
    assert largest_lead(FairByTenant(), {"many": weight, "few": 1.0}) <= BOUND


def test_first_come_does_not_keep_that_bound() -> None:
    assert largest_lead(FirstCome(), {"many": 1.0, "few": 1.0}) > BOUND


@pytest.mark.parametrize("policy", [FairByTenant, FirstCome])
def test_no_step_idles_while_somebody_waits(policy: type[Policy]) -> None:
    traffic = Traffic(policy())
    traffic.send("a", 40)
    traffic.send("b", 3)

    while traffic.scheduler.waiting:
        batch = traffic.step()
        assert batch.num_tokens == BUDGET or len(batch.entries) == MAX_SEQS


def test_a_tenant_saves_nothing_up_while_it_is_away() -> None:
    """Its counter is lifted to the others' when it comes back, so that it is not served alone."""
    traffic = Traffic(FairByTenant())
    traffic.send("steady", 1000)
    for _ in range(400):
        traffic.step()
    before = traffic.service.copy()

    traffic.send("returning", 1000)
    for _ in range(400):
        traffic.step()

    gained = {t: traffic.service[t] - before[t] for t in ("steady", "returning")}
    assert abs(gained["steady"] - gained["returning"]) <= BOUND


def test_within_a_tenant_the_first_to_come_is_the_first_to_go() -> None:
    policy = FairByTenant()
    traffic = Traffic(policy)
    traffic.send("a", 3)
    traffic.send("b", 2)

    order = [sequence.request_id for sequence in policy.order([], traffic.scheduler.waiting)]

    assert [r for r in order if r in "123"] == ["1", "2", "3"]
    assert [r for r in order if r in "45"] == ["4", "5"]


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Traffic(FairByTenant()).send("a", 1, weight=weight)

    assert caught.value.param == "weight"
