"""What one tenant's flood does to another's waits, in virtual time; only the model is fake."""

import random
from statistics import median, quantiles

import pytest

from manylora.engine.places import MAX_PASSES
from manylora.engine.simulation import Arrival, Served, Simulation, StepCost
from support.simulated import arrival, make_scheduler

# Seconds: a step of 256 tokens takes some eight times as long as one of a few.
COST = StepCost(step=0.02, token=0.0005)
NUM_REQUESTS = 60


def light_traffic(seed: int, *, prompt: int) -> list[Arrival]:
    """A tenant that asks for less than its share; its prompts take a few steps each."""
    rng = random.Random(seed)
    at, arrivals = 1.0, []
    for _ in range(NUM_REQUESTS):
        at += rng.uniform(2, 4)
        tokens = rng.randint(prompt // 2, prompt * 3 // 2)
        arrivals.append(arrival(at, "light", prompt=tokens, output=64))
    return arrivals


def flood(seed: int, seconds: float, *, prompt: int) -> list[Arrival]:
    """Far more than can be served, all the time."""
    rng = random.Random(seed)
    return [
        arrival(rng.uniform(0, seconds), "flood", prompt=rng.randint(1, 2 * prompt), output=200)
        for _ in range(900)
    ]


def p95_first_token(policy: str, arrivals: list[Arrival], until: float) -> float:
    simulation = Simulation(make_scheduler(policy=policy, num_kv_blocks=2048), COST)
    served = simulation.run(arrivals, until=until)
    waits = [s.seconds_to_first_token for s in served if s.request.tenant == "light"]
    return quantiles(waits, n=20)[-1] if len(waits) == NUM_REQUESTS else float("inf")


@pytest.mark.parametrize("flood_prompt", [128, 1500])
def test_a_flood_raises_anothers_time_to_first_token_by_half_at_most(flood_prompt: int) -> None:
    light = light_traffic(7, prompt=1000)
    seconds = light[-1].at
    noise = flood(8, seconds, prompt=flood_prompt)

    quiet = p95_first_token("fair", light, seconds + 60)
    flooded = p95_first_token("fair", light + noise, seconds + 60)

    assert flooded <= 1.5 * quiet
    assert p95_first_token("fcfs", light + noise, seconds + 60) > 10 * quiet


def count_preemptions(served: list[Served], tenant: str) -> int:
    return sum(s.num_preemptions for s in served if s.request.tenant == tenant)


def test_who_floods_gives_way_and_nobody_else_does() -> None:
    light = light_traffic(1, prompt=300)
    simulation = Simulation(make_scheduler(num_kv_blocks=2048), COST)

    served = simulation.run([*light, *flood(2, light[-1].at, prompt=128)], until=light[-1].at + 30)

    assert count_preemptions(served, "light") == 0
    assert simulation.num_preemptions > 0
    # A place given up costs little: its tokens are still cached, or few.
    assert simulation.num_preemptions < 3 * NUM_REQUESTS


def test_an_urgent_request_takes_the_place_of_a_lesser_one_when_all_seats_are_taken() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=4)
    lesser = [arrival(0, "a", prompt=32, output=400, priority=5) for _ in range(4)]
    urgent = arrival(1.0, "b", prompt=32, output=4, priority=-1)
    equal = arrival(1.0, "c", prompt=32, output=4, priority=5)

    served = Simulation(scheduler, COST).run([*lesser, urgent, equal])

    waits = {s.request.tenant: s.seconds_to_first_token for s in served}
    assert waits["b"] < 0.2
    assert waits["c"] > 3.0
    assert count_preemptions(served, "a") == 1


def test_under_priority_the_lowest_number_goes_first() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    arrivals = [arrival(0, "a", prompt=8, output=2, priority=p) for p in (3, -2, 0, 3)]

    served = Simulation(scheduler, COST).run(arrivals)

    assert [s.request.priority for s in served] == [-2, 0, 3, 3]
    assert served[2].request == arrivals[0].request


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
@pytest.mark.parametrize("num_kv_blocks", [128, 1024])
def test_under_any_load_everybody_is_served_and_the_pool_comes_back(
    policy: str, num_kv_blocks: int
) -> None:
    rng = random.Random(3)
    arrivals = [
        arrival(
            rng.uniform(0, 40),
            rng.choice("abcde"),
            prompt=rng.randint(1, 400),
            output=(output := rng.randint(1, 300)),
            max_tokens=output + rng.randint(0, 500),
            adapter=rng.choice([None, *"klmnopqrstuv"]),
            priority=rng.randint(0, 2),
        )
        for _ in range(300)
    ]
    scheduler = make_scheduler(policy=policy, num_kv_blocks=num_kv_blocks, prefix_caching=True)

    served = Simulation(scheduler, COST).run(arrivals)

    ids = [s.request.request_id for s in served]
    assert sorted(ids) == sorted(a.request.request_id for a in arrivals)
    assert scheduler.blocks.num_used == 0
    assert all(scheduler.slots.holds(slot) == 0 for slot in range(len(scheduler.slots)))


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_a_hundred_thousand_steps_starve_nobody(policy: str) -> None:
    rng = random.Random(11)
    arrivals = [
        arrival(
            rng.uniform(0, 9_000),
            f"t{rng.randint(0, 9)}",
            prompt=rng.randint(1, 900),
            output=rng.randint(1, 400),
            adapter=rng.choice([None, *"abcdefghijklmnop"]),
            priority=rng.randint(0, 1),
        )
        for _ in range(12_000)
    ]
    simulation = Simulation(make_scheduler(policy=policy, num_kv_blocks=512), COST)

    served = simulation.run(arrivals)

    assert len(served) == len(arrivals)
    assert simulation.num_steps > 100_000
    assert simulation.scheduler.blocks.num_used == 0


def test_who_starves_for_a_slot_does_not_hold_up_those_before_it() -> None:
    """The least urgent waits for a slot, and then for a seat that it never gets."""
    scheduler = make_scheduler(
        policy="priority", max_loras=1, max_num_seqs=4, max_num_batched_tokens=64
    )
    arrivals = [
        arrival(0, "a", prompt=4, output=100, adapter="x"),
        arrival(1, "b", prompt=4, output=3, adapter="y", priority=10),
        *(arrival(at, "c", prompt=4, output=5) for at in range(90, 600)),
        *(
            arrival(at, "d", prompt=4, output=3, adapter="x", priority=-5)
            for at in range(150, 600, 50)
        ),
    ]

    served = Simulation(scheduler, lambda batch: 1.0).run(arrivals)

    assert max(s.seconds_to_first_token for s in served if s.request.tenant == "d") <= 3


def test_no_more_is_given_up_for_others_than_what_was_computed_is_worth() -> None:
    """A stream of small requests of other tenants, each of which may take the long one's seat."""
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=256)
    long = [arrival(0, "long", prompt=3800, output=4), arrival(0, "long", prompt=100, output=900)]
    small = [arrival(8.0 * i, f"small{i % 3}", prompt=20, output=2) for i in range(1, 200)]
    simulation = Simulation(scheduler, lambda batch: 1.0)

    served = simulation.run([*long, *small])

    needed = sum(len(a.request.prompt_token_ids) + a.num_output_tokens for a in (*long, *small))
    first = next(s for s in served if s.request == long[0].request)
    assert first.seconds_to_first_token < 100
    assert simulation.num_tokens < 1.25 * needed
    waits = [s.seconds_to_first_token for s in served if s.request.tenant != "long"]
    assert quantiles(waits, n=20)[-1] < 20


def test_an_adapter_is_loaded_in_the_policys_order_not_behind_a_flood_of_others() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    flood = [arrival(0, "flood", prompt=8, output=50, adapter=f"a{i}") for i in range(100)]
    light = arrival(0, "light", prompt=8, output=2, adapter="l")
    simulation = Simulation(scheduler, lambda batch: 1.0)
    simulation.run([arrival(0, "flood", prompt=8, output=50), *flood, light], until=2)

    assert scheduler.adapters_by_need()[0] == "l" or scheduler.slots.is_resident("l")


@pytest.mark.parametrize("num_adapters", [8, 16])
def test_a_flood_that_fills_every_slot_gives_one_up_for_another_tenant(num_adapters: int) -> None:
    flood = [
        arrival(0, "flood", prompt=16, output=500, adapter=f"f{i % num_adapters}")
        for i in range(400)
    ]
    light = [arrival(20.0 * i, "light", prompt=16, output=4, adapter="l") for i in range(1, 30)]

    served = Simulation(make_scheduler(), lambda batch: 1.0).run([*flood, *light], until=700)

    waits = [s.seconds_to_first_token for s in served if s.request.tenant == "light"]
    assert len(waits) == len(light)
    assert median(waits) <= 3
    assert max(waits) <= MAX_PASSES + 2  # who has just given way is not asked again at once
