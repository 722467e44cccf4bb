"""Simulated engines and environments keep their law exactly, count everything, and cost next to
nothing.
"""

import asyncio
import inspect
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentrl.errors import EngineDeadError, EngineError
from agentrl.flow import now, run_virtual
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.protocols import Env, GenerateRequest
from agentrl.rollout.config import RolloutConfig
from agentrl.settings.sampling import SamplingParams
from agentrl.simulate.config import SimulatedEngineConfig, SimulatedEnvsConfig, SimulationConfig
from agentrl.simulate.engine import FILLER, SimulatedEngine
from agentrl.simulate.env import EpisodePlan, SimulatedCrashError, SimulatedEnvs
from agentrl.simulate.latency import Constant, Latency, Lognormal, Normal, Pareto, Uniform
from agentrl.simulate.world import Report, World
from agentrl.trajectory import Completion
from tests.properties import examples

STOP = 9
close = pytest.approx


def request(
    length: int,
    *,
    name: str = "",
    prompt: int = 1,
    priority: int = 0,
    session: str = "",
    max_tokens: int = 1000,
) -> GenerateRequest:
    """A request whose answer has `length` tokens, its seed says so."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=(STOP,))
    return GenerateRequest(name or f"r{length}", (3,) * prompt, sampling, length, priority, session)


def engine(**config: Any) -> SimulatedEngine:
    """One second per token unless said otherwise; the seed of a request is the length of its
    answer.
    """
    return SimulatedEngine(
        SimulatedEngineConfig(**{"seconds_per_token": 1.0, **config}),
        length_of=lambda request: request.seed,
    )


@dataclass
class Played:
    """What became of a request."""

    ended: float
    completion: Completion


async def play(
    engine: SimulatedEngine, arrivals: Sequence[tuple[float, GenerateRequest]]
) -> list[Played]:
    async def one(when: float, request: GenerateRequest) -> Played:
        await asyncio.sleep(when)
        completion = await engine.generate(request)
        return Played(now(), completion)

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(one(*arrival)) for arrival in arrivals]
    return [task.result() for task in started]


def played(
    engine: SimulatedEngine, *arrivals: tuple[float, GenerateRequest], updates: Sequence[float] = ()
) -> Any:
    """Play the arrivals, with new weights at the times of `updates`, from version 1 on."""

    async def main() -> list[Played]:
        async def update() -> None:
            for version, when in enumerate(updates, 1):
                await asyncio.sleep(when - now())
                await engine.update_weights({}, version)

        async with engine, asyncio.TaskGroup() as tasks:
            tasks.create_task(update())
            return await play(engine, arrivals)

    return run_virtual(main)


# Latencies


@pytest.mark.parametrize(
    ("latency", "mean", "low", "high"),
    [
        (Constant(value=3.0), 3.0, 3.0, 3.0),
        (Uniform(low=1.0, high=3.0), 2.0, 1.0, 3.0),
        (Normal(mean=10.0, sd=5.0, floor=0.1), 10.0, 0.1, math.inf),
        (Lognormal(median=2.0, sigma=1.0), 2.0 * math.exp(0.5), 0.0, math.inf),
        (Lognormal(median=2.0, sigma=1.0, cap=5.0), None, 0.0, 5.0),
        (Pareto(minimum=1.0, alpha=3.0), 1.5, 1.0, math.inf),
        (Pareto(minimum=1.0, alpha=0.5, cap=7.0), None, 1.0, 7.0),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_samples_have_the_mean_and_the_limits_of_their_law(
    latency: Any, mean: float | None, low: float, high: float
) -> None:
    rng = Random(0)
    drawn = [latency.sample(rng) for _ in range(40_000)]
    assert low <= min(drawn)
    assert max(drawn) <= high
    if mean is not None:
        assert statistics.fmean(drawn) == close(mean, rel=0.03)
    elif not math.isinf(high):
        assert max(drawn) == high  # the cap is reached
    again = Random(0)
    assert drawn[:10] == [latency.sample(again) for _ in range(10)]


def test_latencies_are_told_apart_by_kind_and_wrong_ones_are_refused() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Latency)
    assert adapter.validate_python({"kind": "pareto", "minimum": 1, "alpha": 2}) == Pareto(
        minimum=1, alpha=2
    )
    for wrong in (
        {"kind": "gamma"},
        {"value": 1},
        {"kind": "constant", "value": -1},
        {"kind": "constant", "value": 1, "cap": 2},
        {"kind": "uniform", "low": 2, "high": 1},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


# The engine's law


def test_two_requests_share_the_batch_evenly() -> None:
    # Alone until 4; together each second is half a token; alone again when the first has ended.
    first, second = played(
        engine(slowdown=1.0, knee=1), (0.0, request(10, name="a")), (4.0, request(10, name="b"))
    )
    assert (first.ended, second.ended) == (close(16.0), close(20.0))


def test_waiting_requests_are_served_by_priority_and_then_by_arrival() -> None:
    queue = [
        (0.0, request(5)),
        *((n / 10, request(n, priority=p)) for n, p in ((1, 7), (2, 3), (3, 3), (4, 7))),
    ]
    ended = [each.ended for each in played(engine(slots=1), *queue)]
    assert ended == [close(t) for t in (5.0, 11.0, 7.0, 10.0, 15.0)]


def reference(
    jobs: Sequence[tuple[float, int, int]], slots: int, knee: int, slowdown: float
) -> list[float]:
    """When jobs of (arrival, priority, tokens) end: the law of the engine, done naively, event by
    event.
    """
    left = {i: float(tokens) for i, (_, _, tokens) in enumerate(jobs)}
    running: list[int] = []
    ended, clock = [math.inf] * len(jobs), 0.0
    while left:
        waiting = sorted(
            (i for i in left if jobs[i][0] <= clock + 1e-9 and i not in running),
            key=lambda i: (jobs[i][1], jobs[i][0], i),
        )
        running += waiting[: slots - len(running)]
        rate = 1.0 / (1.0 + slowdown * max(0, len(running) - knee) / knee)
        next_end = min((left[i] / rate for i in running), default=math.inf)
        next_arrival = min(
            (jobs[i][0] - clock for i in left if jobs[i][0] > clock + 1e-9), default=math.inf
        )
        step = min(next_end, next_arrival)
        clock += step
        for i in list(running):
            left[i] -= step * rate
            if left[i] < 1e-9:
                ended[i] = clock
                running.remove(i)
                del left[i]
    return ended


@settings(deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 2), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    slots=st.integers(1, 6),
    knee=st.integers(1, 4),
    slowdown=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_answers_come_when_the_law_says(
    jobs: list[tuple[float, int, int]], slots: int, knee: int, slowdown: float
) -> None:
    # No two at once: their order would be nobody's.
    jobs = [(t + i / 100, p, n) for i, (t, p, n) in enumerate(jobs)]
    arrivals = [(t, request(n, name=str(i), priority=p)) for i, (t, p, n) in enumerate(jobs)]
    ended = [
        each.ended for each in played(engine(slots=slots, knee=knee, slowdown=slowdown), *arrivals)
    ]
    assert ended == close(reference(jobs, slots, knee, slowdown), abs=1e-3)


@settings(deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=8),
    updates=st.sets(st.integers(0, 40), max_size=6),
)
def test_each_token_has_the_version_of_its_second(
    jobs: list[tuple[int, int]], updates: set[int]
) -> None:
    times = [update + 0.5 for update in sorted(updates)]
    arrivals = [(float(t), request(n, name=str(i))) for i, (t, n) in enumerate(jobs)]
    for (arrived, length), each in zip(
        jobs, played(engine(), *arrivals, updates=times), strict=True
    ):
        sampled_at = [arrived + k for k in range(1, length + 1)]
        assert list(each.completion.policy_versions) == [
            sum(u < t for u in times) for t in sampled_at
        ]


def test_an_answer_ends_with_the_stop_token_or_at_the_limit() -> None:
    whole, cut, unnamed = played(
        engine(),
        (0.0, request(4)),
        (0.0, request(6, max_tokens=3)),
        (0.0, GenerateRequest("unnamed", (3,), SamplingParams(max_tokens=9), 2)),
    )
    assert whole.completion == Completion(
        (FILLER, FILLER, FILLER, STOP), (0.0,) * 4, (0,) * 4, "stop"
    )
    assert cut.completion == Completion((FILLER,) * 3, (0.0,) * 3, (0,) * 3, "length")
    assert (whole.ended, cut.ended) == (close(4.0), close(3.0))
    assert unnamed.completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("kv_on_update", "updated", "ended", "versions"),
    [
        ("keep", 4.5, 9.0, (0, 0, 0, 1, 1, 1, 1, 1)),
        # 13 tokens of context are prefilled again.
        (
            "recompute",
            4.5,
            10.3,
            (0, 0, 0, 1, 1, 1, 1, 1),
        ),
        # What is due at an update was sampled before it.
        (
            "recompute",
            4.0,
            10.3,
            (0, 0, 0, 1, 1, 1, 1, 1),
        ),
        ("recompute", 0.5, 9.5, (1,) * 8),  # the prefill begins again
        ("keep", 0.5, 9.0, (1,) * 8),
    ],
)
def test_an_update_in_mid_request_splits_its_versions_and_recomputes_its_kv(
    kv_on_update: str, updated: float, ended: float, versions: tuple[int, ...]
) -> None:
    (each,) = played(
        engine(prefill_seconds_per_token=0.1, kv_on_update=kv_on_update),
        (0.0, request(8, prompt=10)),
        updates=[updated],
    )
    assert each.ended == close(ended, abs=1e-4)
    assert tuple(each.completion.policy_versions) == versions


def test_a_later_turn_prefills_only_what_is_new_until_the_weights_change() -> None:
    def turns(*updates: float) -> list[float]:
        return [
            each.ended
            for each in played(
                engine(prefill_seconds_per_token=0.1),
                (0.0, request(10, name="0", prompt=20, session="episode")),
                (100.0, request(10, name="1", prompt=40, session="episode")),
                (200.0, request(10, name="2", prompt=40, session="other")),
                updates=updates,
            )
        ]

    assert turns() == [close(12.0, abs=1e-3), close(111.0, abs=1e-3), close(214.0, abs=1e-3)]
    assert turns(50.0)[1] == close(114.0, abs=1e-3)


@pytest.mark.parametrize(("kv_on_update", "second_ended"), [("keep", 34.0), ("recompute", 32.0)])
def test_no_prefix_of_older_weights_is_served_to_a_later_turn(
    kv_on_update: str, second_ended: float
) -> None:
    # Kept, the first turn's KV is of version 0 to its end; recomputed, it is of version 1.
    tested = engine(prefill_seconds_per_token=0.1, kv_on_update=kv_on_update)
    first = (0.0, request(10, name="0", prompt=10, session="episode"))
    second = (20.0, request(10, name="1", prompt=40, session="episode"))
    assert played(tested, first, second, updates=[5.5])[1].ended == close(second_ended, abs=1e-3)


def test_a_reused_prefix_and_kv_in_flight_are_computed_again_when_they_are_too_old() -> None:
    def second(*updates: float, known: int = 30) -> tuple[float, int]:
        """When the second turn ends, and how many of its tokens are sampled over older KV."""
        tested = engine(prefill_seconds_per_token=0.1, kv_on_update="reuse", kv_max_staleness=1)
        first = (0.0, request(10, name="0", prompt=20, session="episode"))
        later = replace(request(10, name="1", prompt=40, session="episode"), known=known)
        answers = played(tested, first, (100.0, later), updates=updates)
        return round(answers[1].ended, 2), tested.stats().older_kv_tokens

    assert second() == (111.0, 0)
    assert second(50.0) == (111.0, 10)
    assert second(50.0, 60.0) == (114.0, 0)  # too old
    assert second(50.0, known=0) == (114.0, 0)  # it begins anew
    assert second(105.5) == (111.0, 6)
    assert second(50.0, 60.0, 105.5) == (114.0, 9)
    # The KV of version 0 is given up at version 2: of 40 tokens, and 4 sampled ones.
    assert second(50.0, 105.5) == (115.4, 4)


def test_a_run_that_reuses_kv_within_its_bound_is_faster_and_counts_what_was_sampled_over_it() -> (
    None
):
    def run(kv_on_update: str, max_staleness: int) -> Report:
        served = {"kv_on_update": kv_on_update, "prefill_seconds_per_token": 0.01, "slots": 16}
        simulation = SimulationConfig.model_validate(
            {"engine": served, "train_seconds": {"kind": "constant", "value": 2.0}}
        )
        rollout = RolloutConfig.model_validate(
            {"groups_per_step": 2, "group_size": 4, "max_staleness": max_staleness}
        )
        return World(rollout, simulation, steps=6, goes_on=True).run()

    name = "older_kv_tokens"
    reused, recomputed, none_older = run("reuse", 2), run("recompute", 2), run("reuse", 0)
    assert 0 < reused.metrics[name] <= reused.metrics["generated_tokens"]
    assert name not in recomputed.metrics
    assert name not in none_older.metrics
    assert reused.seconds < recomputed.seconds
    assert none_older.seconds == run("recompute", 0).seconds


def test_idle_prefixes_leave_the_cache_least_recently_used_first() -> None:
    async def main() -> tuple[int, int]:
        async with engine(kv_tokens=100, max_context=100) as tested:
            for i in range(4):  # 30 tokens each: the first one must go
                await tested.generate(request(10, name=f"{i}", prompt=20, session=f"{i}"))
            await tested.generate(request(10, name="again 0", prompt=30, session="0"))
            missed = tested.stats().cached_tokens
            await tested.generate(request(10, name="again 3", prompt=31, session="3"))
            return missed, tested.stats().cached_tokens

    assert run_virtual(main) == (0, 30)


def test_a_full_cache_preempts_the_youngest_whose_context_is_computed_again() -> None:
    tested = engine(kv_tokens=20, max_context=20, prefill_seconds_per_token=0.1)
    first, second = played(
        tested,
        (0.0, request(10, name="a", prompt=5)),
        (0.0, request(10, name="b", prompt=5)),
        updates=[4.9],
    )
    assert (tested.stats().preemptions, first.ended) == (1, close(11.4, abs=1e-3))
    # Five tokens are sampled when the cache is full; then it waits, and prefills ten.
    assert tuple(second.completion.policy_versions) == (0,) * 4 + (1,) * 6
    assert second.ended > first.ended + 1.0 + 4.0
    assert len(second.completion.token_ids) == 10


def test_of_two_requests_the_less_urgent_is_preempted() -> None:
    tested = engine(kv_tokens=20, max_context=20)
    late, early = played(
        tested,
        (0.0, request(10, name="a", prompt=5, priority=8)),
        (0.0, request(10, name="b", prompt=5, priority=3)),
    )
    assert (early.ended, late.ended, tested.stats().preemptions) == (
        close(10.0),
        close(15.0, abs=1e-3),
        1,
    )


def test_statistics_say_what_the_engine_does_now() -> None:
    async def main() -> None:
        async with (
            engine(slots=2, kv_tokens=100, max_context=100) as tested,
            asyncio.TaskGroup() as tasks,
        ):
            for i in range(3):
                tasks.create_task(tested.generate(request(10, name=str(i), prompt=10)))
            await asyncio.sleep(4.5)
            stats = tested.stats()
            assert (
                stats.running,
                stats.waiting,
                stats.generated_tokens,
                stats.prefilled_tokens,
            ) == (2, 1, 8, 20)
            assert stats.kv_use == close(0.29)
            await asyncio.sleep(100)
            stats = tested.stats()
            assert (stats.running, stats.waiting, stats.generated_tokens, stats.kv_use) == (
                0,
                0,
                30,
                0.0,
            )
            assert tested.slot_seconds == close(30.0)

    run_virtual(main)


def test_cancellation_frees_the_slot_at_once() -> None:
    async def main() -> None:
        async with engine(slots=1) as tested, asyncio.TaskGroup() as tasks:
            first = tasks.create_task(tested.generate(request(100, name="first")))
            waiting = tasks.create_task(tested.generate(request(100, name="waiting")))
            last = tasks.create_task(tested.generate(request(5, name="last")))
            await asyncio.sleep(3.5)
            waiting.cancel()
            first.cancel()
            await last
            assert now() == close(8.5)
            assert tested.cancelled_tokens == 3
            assert tested.stats().generated_tokens == 8

    run_virtual(main)


def test_interrupted_requests_return_what_they_have_and_go_on_from_there() -> None:
    async def main() -> None:
        async with engine(slots=1) as tested, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(tested.generate(request(10, name="running")))
            waiting = tasks.create_task(tested.generate(request(10, name="waiting")))
            await asyncio.sleep(4.5)
            await tested.interrupt()
            stats = tested.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert await running == Completion((FILLER,) * 4, (0.0,) * 4, (0,) * 4, "abort")
            assert await waiting == Completion((), (), (), "abort")
            rest = await tested.generate(request(10, name="running", prompt=5))
            assert (len(rest.token_ids), rest.finish_reason) == (6, "stop")
            assert now() == close(10.5)

    run_virtual(main)


def test_a_dead_engine_says_so_to_everybody() -> None:
    async def main() -> None:
        tested = engine(dies_at=5.0)
        with pytest.raises(EngineDeadError):
            await tested.generate(request(1))
        async with tested:
            assert len((await tested.generate(request(4))).token_ids) == 4
            with pytest.raises(EngineDeadError):
                await tested.generate(request(4))
            assert now() == close(5.0)
            for call in (
                tested.generate(request(1)),
                tested.interrupt(),
                tested.update_weights({}, 1),
            ):
                with pytest.raises(EngineDeadError):
                    await call
            assert tested.stats().generated_tokens == 4 + 1
            assert tested.cancelled_tokens == 1

    run_virtual(main)


@pytest.mark.parametrize("seconds_per_token", [0.0, 1.0])
def test_a_hung_engine_and_a_lost_request_never_answer(seconds_per_token: float) -> None:
    async def main() -> None:
        for config in ({"hangs_at": now() + 2.0}, {"lost": 1.0}):
            async with engine(seconds_per_token=seconds_per_token, **config) as tested:
                await asyncio.sleep(2.0 if "hangs_at" in config else 0.0)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1000):
                        await tested.generate(request(4))
                assert tested.stats().running == tested.stats().waiting == 0

    run_virtual(main)


def test_an_instant_engine_sets_no_timer() -> None:
    tested = SimulatedEngine(
        SimulatedEngineConfig(seconds_per_token=0.0, answer_tokens=Constant(value=5))
    )

    async def main() -> None:
        async with tested:
            with pytest.raises(StopIteration) as answered:
                tested.generate(request(5)).send(None)  # it ends without having waited for anything
            assert len(answered.value.value.token_ids) == 5

    run_virtual(main)


def test_the_same_seed_is_answered_as_long_and_lengths_are_of_the_law() -> None:
    config = SimulatedEngineConfig(
        seconds_per_token=0.0, answer_tokens=Lognormal(median=100, sigma=0.5)
    )

    async def lengths() -> list[int]:
        async with SimulatedEngine(config) as tested:
            seeds = Random(1)
            requests = (
                GenerateRequest("r", (3,), SamplingParams(max_tokens=10_000), seeds.getrandbits(63))
                for _ in range(5000)
            )
            return [len((await tested.generate(request)).token_ids) for request in requests]

    drawn = run_virtual(lengths)
    assert drawn == run_virtual(lengths)
    assert statistics.fmean(drawn) == close(100 * math.exp(0.125), rel=0.05)


def test_wrong_requests_and_settings_are_refused() -> None:
    async def main() -> None:
        async with engine(max_context=10) as tested, asyncio.TaskGroup() as tasks:
            tasks.create_task(tested.generate(request(5)))
            await asyncio.sleep(0)
            for wrong in (request(5), request(3, prompt=10)):
                with pytest.raises(EngineError):
                    await tested.generate(wrong)
            await tested.update_weights({}, 3)
            with pytest.raises(EngineError, match="versions only grow"):
                await tested.update_weights({}, 3)

    run_virtual(main)
    for config in (
        {"kv_tokens": 10, "max_context": 20},
        {"seconds_per_token": 0, "kv_tokens": 10, "max_context": 10},
    ):
        with pytest.raises(ValidationError):
            SimulatedEngineConfig(**config)


@examples(60)
@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(1, 5),
    kv=st.sampled_from([None, 60, 200]),
    kv_on_update=st.sampled_from(["recompute", "keep", "reuse"]),
)
def test_every_sampled_token_reaches_its_caller_or_is_counted_as_cancelled(
    seed: int, slots: int, kv: int | None, kv_on_update: str
) -> None:
    rng = Random(seed)
    tested = engine(
        slots=slots,
        kv_tokens=kv,
        max_context=60,
        slowdown=1.0,
        knee=2,
        prefill_seconds_per_token=0.2,
        kv_on_update=kv_on_update,
        kv_max_staleness=1,
    )
    answered: list[Completion] = []

    async def client(number: int) -> None:
        await asyncio.sleep(rng.randrange(60))
        asked = request(
            rng.randint(1, 30), name=str(number), prompt=rng.randint(1, 30), session=str(number % 3)
        )
        try:
            async with asyncio.timeout(rng.choice([None, 7, 30])):
                answered.append(await tested.generate(asked))
        except TimeoutError:
            pass

    async def disturb() -> None:
        for version in range(1, 8):
            await asyncio.sleep(rng.randrange(20))
            await tested.update_weights({}, version)
            if rng.random() < 0.3:
                await tested.interrupt()

    async def main() -> None:
        async with tested, asyncio.TaskGroup() as tasks:
            for number in range(25):
                tasks.create_task(client(number))
            tasks.create_task(disturb())

    run_virtual(main)
    stats = tested.stats()
    assert (
        stats.generated_tokens
        == sum(len(each.token_ids) for each in answered) + tested.cancelled_tokens
    )
    assert (stats.running, stats.waiting, stats.kv_use) == (0, 0, 0.0)
    assert all(list(each.policy_versions) == sorted(each.policy_versions) for each in answered)


@pytest.mark.long
def test_200_000_requests_are_a_matter_of_seconds() -> None:
    config = SimulatedEngineConfig(
        slowdown=1.0, knee=32, answer_tokens=Lognormal(median=140, sigma=0.6, cap=500)
    )
    tested = SimulatedEngine(config)

    async def client(number: int) -> None:
        for turn in range(200):
            seed = number * 7919 + turn * 104729
            await tested.generate(
                GenerateRequest(
                    f"{number}/{turn}", (3,) * 50, SamplingParams(max_tokens=1000), seed
                )
            )

    async def main() -> None:
        async with tested, asyncio.TaskGroup() as tasks:
            for number in range(1000):
                tasks.create_task(client(number))

    began = time.process_time()
    run_virtual(main)
    print(f"{(time.process_time() - began) / 200_000 * 1e6:.1f} CPU-µs per request")


# Environments


async def episode(env: Any, seed: int) -> list[float]:
    """The seconds of reset and steps, and the reward."""
    began = now()
    result = env.reset(seed=seed, options={})
    if inspect.isawaitable(result):
        await result
    times, over = [now() - began], False
    while not over:
        began = now()
        result = env.step("")
        _, reward, over, _, _ = await result if inspect.isawaitable(result) else result
        times.append(now() - began)
    return [*times, reward]


SLOW = SimulatedEnvsConfig(
    turns=Uniform(low=2, high=9),
    reset_seconds=Constant(value=2.0),
    step_seconds=Lognormal(median=1.0, sigma=1.0),
)


def test_members_of_a_group_differ_and_the_same_run_is_the_same() -> None:
    async def group() -> list[list[float]]:
        envs = SimulatedEnvs(SLOW, seed=4)
        return [await episode(envs(), 17) for _ in range(8)]

    first, again = run_virtual(group), run_virtual(group)
    assert [close(times) for times in first] == again
    assert len({tuple(times) for times in first}) == 8
    assert {times[0] for times in first} == {2.0}


@pytest.mark.parametrize("how", ["close", "reset"])
def test_an_episode_that_was_broken_off_is_played_again_as_it_was(how: str) -> None:
    async def main() -> None:
        fresh = SimulatedEnvs(SLOW, seed=4)
        expected = [await episode(fresh(), 17) for _ in range(3)]
        envs = SimulatedEnvs(SLOW, seed=4)
        first, second = envs(), envs()
        for env in (first, second):
            await env.reset(seed=17, options={})
        await second.step("")
        if how == "close":
            second.close()
            second.close()
            assert (envs.made, envs.closed, envs.playing) == (2, 1, 1)
            second = envs()
        assert await episode(second, 17) == close(expected[1])
        assert await episode(second, 17) == close(expected[2])
        assert (envs.episodes, envs.playing) == (2, 1)

    run_virtual(main)


@pytest.mark.parametrize(
    ("trouble", "seconds"),
    [("none", [1.0] * 4), ("fail_slow", [1.0, 1.0, 1.0, 601.0]), ("slow_drip", [10.0] * 4)],
)
def test_slow_troubles_take_their_time(trouble: str, seconds: list[float]) -> None:
    config: dict[str, Any] = {"turns": Constant(value=4), "step_seconds": Constant(value=1.0)}
    envs = SimulatedEnvs(
        SimulatedEnvsConfig(**config, **({} if trouble == "none" else {trouble: 1.0}))
    )

    async def main() -> list[float]:
        return (await episode(envs(), 17))[1:-1]

    assert sorted(run_virtual(main)) == close(seconds)
    assert sum(envs.troubles.values()) == (trouble != "none")


def test_a_crash_raises_and_a_hung_step_never_returns() -> None:
    async def main() -> None:
        crashing, hanging = (
            SimulatedEnvs(SimulatedEnvsConfig(crash=1.0)),
            SimulatedEnvs(SimulatedEnvsConfig(hung=1.0)),
        )
        with pytest.raises(SimulatedCrashError):
            await episode(crashing(), 1)
        env = hanging()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(episode(env, 1), 1e6)
        assert (hanging.hanging, hanging.playing) == (0, 1)
        env.close()
        assert (hanging.playing, hanging.closed) == (0, 1)

    run_virtual(main)


def test_troubles_come_in_their_shares_and_are_drawn_anew_at_each_attempt() -> None:
    shares = {"hung": 0.1, "crash": 0.05, "fail_slow": 0.2, "slow_drip": 0.15}
    envs = SimulatedEnvs(SimulatedEnvsConfig(**shares), seed=2)
    attempts = []
    for task in range(4000):
        for _ in range(2):  # the second one is the same member again
            attempts.append(envs.begin(task))
            envs.end(attempts[-1], whole=False)
    assert all(attempt.member == 0 for attempt in attempts)
    for trouble, share in shares.items():
        assert envs.troubles[trouble] / 8000 == close(share, abs=0.015)
    hung = [
        later.trouble
        for first, later in zip(attempts[::2], attempts[1::2], strict=True)
        if first.trouble == "hung"
    ]
    assert hung.count("hung") / len(hung) == close(0.1, abs=0.05)


def test_hopeless_and_trivial_tasks_have_no_variance() -> None:
    envs = SimulatedEnvs(SimulatedEnvsConfig(hopeless=0.3, trivial=0.2, solve_rate=0.5), seed=1)
    groups = [[envs.begin(task).plan.reward for _ in range(16)] for task in range(600)]
    assert sum(not any(group) for group in groups) / 600 == close(0.3, abs=0.06)
    assert sum(all(group) for group in groups) / 600 == close(0.2, abs=0.06)
    assert statistics.fmean(map(statistics.fmean, groups)) == close(0.45, abs=0.06)


def test_a_call_that_takes_no_time_answers_at_once() -> None:
    env = SimulatedEnvs(SimulatedEnvsConfig(turns=Constant(value=2)))()
    assert isinstance(env, Env)
    assert env.reset(seed=0, options={}) == ("go", {})
    assert env.step("") == ("go on", 0.0, False, False, {})
    result = env.step("")
    assert isinstance(result, tuple)
    assert result[2]
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("")


def test_a_plan_may_come_from_elsewhere() -> None:
    envs = SimulatedEnvs(plan_of=lambda task, member: EpisodePlan(task, (1.0, 2.0 + member), 1.0))

    async def main() -> list[list[float]]:
        return [await episode(envs(), 5), await episode(envs(), 5)]

    assert run_virtual(main) == [[5.0, 1.0, 2.0, 1.0], [5.0, 1.0, 3.0, 1.0]]


def test_the_host_of_environments_plays_them_and_leaks_none() -> None:
    envs = SimulatedEnvs(
        SimulatedEnvsConfig(
            step_seconds=Uniform(low=0, high=2), hung=0.1, crash=0.1, slow_drip=0.1
        ),
        seed=3,
    )

    async def main() -> None:
        host = EnvPool({"simulated": envs}, EnvDeadlines(step=30.0))

        async def one(seed: int) -> None:
            env = host.acquire("simulated")
            try:
                await env.reset(seed, {})
                while not (await env.step(""))[2]:
                    pass
            except Exception:
                env.broken = True
            finally:
                await host.release("simulated", env)

        async with asyncio.TaskGroup() as tasks:
            for seed in range(200):
                tasks.create_task(one(seed))
        await host.close()

    run_virtual(main)
    assert envs.episodes == 200 - envs.troubles["hung"] - envs.troubles["crash"]
    assert 10 < envs.troubles["hung"] < 40
    assert (envs.made, envs.playing, envs.hanging) == (envs.closed, 0, 0)


def test_the_attempts_of_many_tasks_are_forgotten() -> None:
    envs = SimulatedEnvs(plan_of=lambda task, member: EpisodePlan(0.0, (0.0,), 0.0))
    for task in range(70_000):
        envs.end(envs.begin(task), whole=True)
    assert len(envs._tasks) <= 1 << 16
