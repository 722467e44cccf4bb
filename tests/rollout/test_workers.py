"""Rollout workers: on the event loop of the test, in processes, and as actors of Ray."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cluster.parcel import MemoryProbe, Parcel
from agentrl.cluster.processes import ProcessWorker
from agentrl.cluster.workers import StartWorker
from agentrl.engines.router import Router
from agentrl.errors import ConfigError, EngineError, WorkerDiedError
from agentrl.flow import Flow
from agentrl.ledger.ledger import Ledger
from agentrl.net.link import Door, MessageLink, connect, open_door
from agentrl.net.pickled import Pickled
from agentrl.plugins import NoSettings
from agentrl.protocols import Engine, GenerateRequest
from agentrl.rollout.assignment import Assignment, MemberReport, TokensSampled, TurnsPlayed
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scheduler import Rollouts
from agentrl.rollout.workers.host import OpenParts, _Playing
from agentrl.rollout.workers.messages import PlayedPolicy, Received
from agentrl.rollout.workers.pool import RolloutWorkers, WorkerRunner
from agentrl.rollout.workers.progress import ProgressReader, ProgressSender
from agentrl.rollout.workers.scaling import WorkerScaling
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.seeded import SeededTasks
from agentrl.testing import ScriptedEngine
from agentrl.testing.workers import InlineWorkers
from agentrl.trajectory import Failed, Group, Score, Task, Terminated, Trajectory
from tests.processes import PATIENCE_SECONDS
from tests.rollout.worker_parts import ASKED, RENDERER, dice_parts, no_parts, noted_parts, says

SAMPLING = SamplingParams(max_tokens=64, temperature=1.0, stop_token_ids=RENDERER.stop_token_ids)
POLICY = PlayedPolicy("policy", SAMPLING, trained=True)
PLACES = [
    "inline",
    pytest.param("processes", marks=pytest.mark.slow),
    pytest.param("ray", marks=pytest.mark.slow),
]
NEARBY = [*PLACES[:2], pytest.param("ray", marks=pytest.mark.long)]
"""Of what Ray's actors have no part in."""


def start_at(place: str, **options: Any) -> StartWorker:
    """What starts workers at a place."""
    if place == "inline":
        return InlineWorkers(serve="play_for")
    if place == "processes":
        return partial(ProcessWorker.start, **options)
    from agentrl.cluster.ray_actors import RayWorkers
    from tests.cluster.shared_ray import join_shared_ray

    join_shared_ray()
    return RayWorkers(**options).one


def scripted(**options: Any) -> ScriptedEngine:
    return ScriptedEngine.replying(says, **options)


@asynccontextmanager
async def workers_at(
    place: str,
    count: int,
    engine: Engine | None = None,
    *,
    parts: OpenParts = dice_parts,
    silence: float = PATIENCE_SECONDS,
    scaling: WorkerScaling | None = None,
    **options: Any,
) -> AsyncIterator[RolloutWorkers]:
    """Workers that play `Dice` with a scripted engine."""
    engine = engine or scripted()
    start = start_at(place, **options)
    imports = ["tests.rollout.worker_parts"]  # processes are forked with it
    pool = RolloutWorkers(start, parts, count, scaling=scaling, silence=silence, imports=imports)
    async with engine, pool as workers:
        workers.engines.name_of(engine, "policy")
        yield workers


def episode(seed: int = 3, **options: Any) -> Assignment:
    return Assignment(f"train-{seed}/0/0", Task("dice", seed, options, f"train-{seed}"), seed=seed)


async def play(workers: RolloutWorkers, assignment: Assignment) -> Trajectory:
    async with asyncio.timeout(PATIENCE_SECONDS):
        (played,) = await workers.play(POLICY, assignment, lambda report: None)
    return played


async def eventually(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not happened():  # noqa: ASYNC110  nothing signals it
            await asyncio.sleep(0.02)


class Sum:
    """The reward: what the environment paid."""

    async def score(self, trajectory: Trajectory) -> Score:
        return Score(trajectory.env_return, {"env": trajectory.env_return})


def without_times(trajectory: Trajectory) -> Trajectory:
    turns = tuple(
        replace(turn, generate_seconds=0.0, env_seconds=0.0, asked=0.0) for turn in trajectory.turns
    )
    return replace(trajectory, turns=turns, seconds=0.0, started=0.0)


def timeless(group: Group) -> Group:
    scores = tuple(replace(score, scoring_spans=()) for score in group.scores)
    return replace(group, trajectories=tuple(map(without_times, group.trajectories)), scores=scores)


async def trained(runner: EpisodeRunner, engine: Engine, ledger: Ledger) -> list[list[Group]]:
    """The batches of three steps."""
    config = RolloutConfig(groups_per_step=4, group_size=3)
    rollouts = Rollouts(
        config,
        tasks=SeededTasks(NoSettings(), "dice", 7),
        runner=runner,
        reward=Sum(),
        engine=engine,
        ledger=ledger,
        seed=7,
        groups=12,
    )
    batches = []
    async with rollouts:
        for step in range(3):
            batches.append(await rollouts.next_batch())
            async with rollouts.new_weights(step + 1):
                await engine.update_weights({}, step + 1)
    return [list(map(timeless, batch)) for batch in batches]


@pytest.mark.parametrize("place", PLACES)
def test_workers_play_train_and_record_what_one_process_does(place, tmp_path):
    async def alone(ledger: Ledger) -> list[list[Group]]:
        async with scripted() as engine, dice_parts(lambda name: engine) as make_runner:
            return await trained(make_runner(POLICY), engine, ledger)

    async def on_workers(ledger: Ledger) -> list[list[Group]]:
        engine = scripted()
        async with workers_at(place, 2, engine) as workers:
            runner = WorkerRunner(workers, POLICY, RENDERER)
            batches = await trained(runner, engine, ledger)
            assert workers.metrics()["rollout_workers/lost_episodes"] == 0
        return batches

    ledgers = [Ledger(tmp_path / "alone.sqlite"), Ledger(tmp_path / "workers.sqlite")]
    expected = asyncio.run(alone(ledgers[0]))
    assert asyncio.run(on_workers(ledgers[1])) == expected
    assert expected[2][0].trajectories[0].turns[0].completion.policy_versions[0] == 2
    assert len(list(ledgers[0].outcomes())) == 12
    assert list(ledgers[0].outcomes()) == list(ledgers[1].outcomes())
    for ledger in ledgers:
        ledger.close()


@pytest.mark.parametrize("place", NEARBY)
def test_a_failure_of_an_episode_comes_back_as_it_is(place):
    async def main() -> None:
        def refuses(request: GenerateRequest) -> Exception | None:
            return EngineError("no place") if request.session.startswith("train-5") else None

        async with workers_at(place, 1, scripted(fail=refuses)) as workers:
            raised = await play(workers, episode(raises=True))
            assert isinstance(raised.status, Failed)
            assert raised.status.layer == "environment"
            assert "the dice are gone" in raised.status.error
            assert "worker_parts.py:" in raised.status.error  # the user's own frame
            assert len(raised.turns) == 2
            refused = await play(workers, episode(5))
            assert refused.status == Failed("engine", "no place")
            assert (await play(workers, episode())).status == Terminated()

    asyncio.run(main())


@pytest.mark.parametrize("place", NEARBY)
def test_wrong_settings_are_raised_with_their_frames(place):
    async def main() -> None:
        async with workers_at(place, 1) as workers:
            unlucky = replace(POLICY, sampling=SamplingParams(max_tokens=13))
            with pytest.raises(ConfigError, match="bad luck") as caught:
                await workers.play(unlucky, episode(), lambda report: None)
            assert "make_runner" in caught.value.__notes__[0]
            assert (await play(workers, episode())).status == Terminated()

    asyncio.run(main())


@pytest.mark.parametrize("place", NEARBY)
def test_parts_that_cannot_be_opened_end_the_start(place):
    async def main() -> None:
        async with workers_at(place, 2, parts=no_parts):
            raise AssertionError("they have started")

    with pytest.raises(ConfigError, match="did you mean 'dice'"):
        asyncio.run(main())


@pytest.mark.parametrize("place", PLACES)
def test_a_cancelled_episode_ends_in_its_worker_too(place):
    async def main() -> None:
        async with workers_at(place, 1) as workers:
            begun = asyncio.Event()
            playing = asyncio.get_running_loop().create_task(
                workers.play(POLICY, episode(hangs=True), lambda report: begun.set())
            )
            async with asyncio.timeout(PATIENCE_SECONDS):
                await begun.wait()
            playing.cancel()
            await asyncio.wait({playing}, timeout=PATIENCE_SECONDS)
            assert playing.cancelled()
            assert workers.metrics()["rollout_workers/most_live"] == 0
            assert (await play(workers, episode())).status == Terminated()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("place", ["processes", pytest.param("ray", marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_is_killed_or_stopped_costs_its_episodes_and_is_replaced(
    place, how, tmp_path
):
    async def main() -> None:
        async with workers_at(place, 2, lease=4.0) as workers:
            once = str(tmp_path / "once")
            fatal = episode(3, once=once, how=how)
            beside = [episode(seed) for seed in (4, 5, 6, 7)]
            async with asyncio.TaskGroup() as group:
                first = group.create_task(play(workers, fatal))
                others = [group.create_task(play(workers, one)) for one in beside]
            died = first.result().status
            assert isinstance(died, Failed)
            assert died.layer == "environment"
            assert "rollout" in died.error
            assert "died" in died.error
            assert not died.final  # it is played again
            assert {type(one.result().status) for one in others} <= {Terminated, Failed}
            assert (await play(workers, fatal)).status == Terminated()
            assert workers.metrics()["rollout_workers/lost_episodes"] >= 1
            await eventually(lambda: workers.worker_count().alive == 2)
            assert workers.worker_count().restarts == 1

    asyncio.run(main())
    if place == "processes":
        assert not Path(f"/proc/{(tmp_path / 'once').read_text()}").exists()


@pytest.mark.slow
def test_a_replaced_worker_waits_for_sandboxes_that_are_away(tmp_path):
    away = tmp_path / "away"
    boxed = {"name": "tests.rollout.worker_parts:Sandboxes", "away": str(away)}

    async def main() -> None:
        async with workers_at("processes", 1) as workers:
            await play(workers, episode(sandbox=boxed))
            away.touch()
            once = str(tmp_path / "once")
            await play(workers, episode(3, once=once, how="SIGKILL"))
            await eventually(lambda: workers.worker_count().alive == 1)
            failed = (await play(workers, episode(sandbox=boxed))).status
            assert isinstance(failed, Failed)
            assert failed.outage
            assert "could not reach the engine of containers" in failed.error
            away.unlink()
            assert (await play(workers, episode(sandbox=boxed))).status == Terminated()
            away.touch()
        # A run that begins without them says what is wrong instead.
        async with workers_at("processes", 1) as workers:
            with pytest.raises(ConfigError, match="could not reach the engine of containers"):
                await play(workers, episode(sandbox=boxed))

    asyncio.run(main())


def test_a_worker_whose_event_loop_is_blocked_is_given_up(tmp_path):
    async def main() -> None:
        async with workers_at("processes", 1, silence=4.0) as workers:
            once = str(tmp_path / "once")
            blocked = episode(3, once=once, how="block")
            status = (await play(workers, blocked)).status
            assert isinstance(status, Failed)
            assert "an environment blocks it" in status.error
            assert (await play(workers, blocked)).status == Terminated()

    asyncio.run(main())


@pytest.mark.slow
def test_a_task_that_workers_die_of_is_set_aside_and_those_beside_it_are_not():
    async def main() -> None:
        async with workers_at("processes", 1) as workers:
            await play(workers, episode(3))  # the run is known to work
            lethal, beside = episode(3, kills=True), episode(7, hangs=True)
            for _ in range(2):
                async with Flow("both") as flow:
                    both = [flow.start(play(workers, one), name=one.id) for one in (lethal, beside)]
                for one in both:
                    status = one.result().status
                    assert isinstance(status, Failed)
                    assert not status.final
            async with Flow("in turn") as flow:
                kills = flow.start(play(workers, lethal), name="lethal")
                hangs = flow.start(play(workers, beside), name="beside")
                await asyncio.wait({kills})
                fails = (await play(workers, lethal)).status
                await eventually(lambda: workers.metrics()["rollout_workers/most_live"] == 1)
                assert not hangs.done()
                flow.cancel()
            assert isinstance(fails, Failed)
            assert fails.final
            assert "rollout workers died 3 times while they worked on the task of seed 3" in (
                fails.error
            )
            count = workers.worker_count()
            assert (count.restarts, count.set_aside) == (3, 1)

    asyncio.run(main())


def test_workers_that_keep_dying_end_the_run():
    class Dead(InlineWorkers):
        async def __call__(self, role: str, make: Any, rank: int) -> Any:
            worker = await super().__call__(role, make, rank)
            worker.kill()
            return worker

    async def main() -> None:
        async with scripted() as engine, RolloutWorkers(Dead(), dice_parts, 1):
            raise AssertionError(f"they have started with {engine}")

    with pytest.raises(WorkerDiedError, match="it was killed"):
        asyncio.run(main())


def test_the_clock_of_an_engine_stands_still_in_the_workers_too():
    async def main() -> None:
        sleeps = Router([scripted()])
        async with workers_at("inline", 1, sleeps, parts=noted_parts) as workers:
            await play(workers, episode())
            clock = ASKED[-1].clock
            assert clock is not None
            assert not clock.is_held
            with sleeps.clock.held():
                await play(workers, episode())
                assert clock.is_held
            await play(workers, episode())
            assert not clock.is_held

    asyncio.run(main())


def test_nobody_enters_without_the_token():
    async def main() -> None:
        taken: list[Any] = []
        admitted: list[int] = []

        def admit(rank: int, link: MessageLink) -> Any:
            admitted.append(rank)
            return taken.append

        async with open_door("127.0.0.1", admit) as door:
            wrong = await connect(Door(door.host, door.port, bytes(32)), 0, taken.append)
            wrong.send("let me in")
            async with asyncio.timeout(PATIENCE_SECONDS):
                await wrong.closed
            right = await connect(door, 1, taken.append)
            right.send("hello")
            right.send("again")
            await eventually(lambda: len(taken) == 2)
            right.close()
        assert admitted == [1]
        assert taken == ["hello", "again"]

    asyncio.run(main())


@given(st.lists(st.integers(0, 3), max_size=6))
def test_segments_arrive_whole_though_only_new_turns_are_sent(growths):
    turns = asyncio.run(_some_turns())
    sender, reader = ProgressSender(), ProgressReader()
    played: list[Any] = []
    for grown in growths:
        if played:
            played[-1] = replace(played[-1], reward=played[-1].reward + 1)  # it earned more later
        played += turns[:grown]
        segment = Trajectory("e", Task("dice", 0, {}, "t"), tuple(played), Terminated())
        changes = sender.changes((segment,))
        assert len(changes.segments[0].turns) <= grown + 1
        assert reader.segments(changes) == (segment,)


async def _some_turns() -> Sequence[Any]:
    async with scripted() as engine, dice_parts(lambda name: engine) as make_runner:
        (played,) = await make_runner(POLICY).play(episode(3), lambda report: None)
    return played.turns


def test_an_episode_reports_its_tokens_and_turns_while_it_is_played():
    async def main() -> None:
        async with workers_at("inline", 1) as workers:
            assignment = replace(episode(3), reports_turns=True)
            (played,) = await workers.play(POLICY, assignment, reports.append)
        sampled = sum(report.tokens for report in reports if isinstance(report, TokensSampled))
        assert sampled == played.num_tokens
        shown = [report.segments for report in reports if isinstance(report, TurnsPlayed)]
        assert [len(parts[0].turns) for parts in shown if parts] == [0, 1, 2, 3]
        assert shown[-1] == ()
        assert shown[-2][0].turns == played.turns[:3]

    reports: list[MemberReport] = []
    asyncio.run(main())


def speaks_long(request: GenerateRequest) -> bytes:
    """An answer of 3,000 tokens, which depends on the seed and the prompt."""
    return says(request) + b"." * 3000


LONG = replace(POLICY, sampling=SAMPLING.model_copy(update={"max_tokens": 4000}))


def memory_of_parcels() -> tuple[int, int]:
    """How often this process maps the memory of parcels, and how many it keeps."""
    mapped = Path("/proc/self/maps").read_text().count("agentrl-parcel")
    kept = [os.readlink(one.path) for one in os.scandir("/proc/self/fd") if one.is_symlink()]
    return mapped, sum("agentrl-parcel" in name for name in kept)


@pytest.mark.parametrize(
    ("place", "is_here"),
    [
        ("inline", True),
        ("inline", False),
        pytest.param("processes", True, marks=pytest.mark.slow),
        pytest.param("processes", False, marks=pytest.mark.long),
        pytest.param("ray", True, marks=pytest.mark.long),
        pytest.param("ray", False, marks=pytest.mark.long),
    ],
)
def test_long_episodes_are_mapped_where_the_worker_has_laid_them(place, is_here, monkeypatch):
    if not is_here:
        monkeypatch.setattr(MemoryProbe, "is_reachable", lambda probe: False)

    async def main() -> None:
        engine = ScriptedEngine.replying(speaks_long, max_context=1 << 15)
        async with workers_at(place, 1, engine) as workers, asyncio.timeout(PATIENCE_SECONDS):
            gc.collect()
            mapped, _ = memory_of_parcels()
            found = [await workers.play(LONG, episode(seed), print) for seed in (2, 3)]
            assert memory_of_parcels()[0] - mapped == (2 if is_here else 0)
            await eventually(lambda: memory_of_parcels()[1] == 0)  # the worker has given it up
        async with engine, dice_parts(lambda name: engine) as make_runner:
            runner = make_runner(LONG)
            wanted = [await runner.play(episode(seed), print) for seed in (2, 3)]
        for (one,), (other,) in zip(found, wanted, strict=True):
            assert without_times(one) == without_times(other)

    asyncio.run(main())


def test_an_episode_whose_memory_is_gone_is_lost_with_its_worker(monkeypatch):
    def gone(parcel: Parcel) -> Pickled:
        raise FileNotFoundError("/proc/1/fd/9")

    async def main() -> None:
        engine = ScriptedEngine.replying(speaks_long, max_context=1 << 15)
        async with workers_at("inline", 1, engine) as workers, asyncio.timeout(PATIENCE_SECONDS):
            with monkeypatch.context() as patched:
                patched.setattr(Parcel, "mapped", gone)
                (lost,) = await workers.play(LONG, episode(), print)
            assert isinstance(lost.status, Failed)
            assert "cannot be read: /proc/1/fd/9" in lost.status.error
            (played,) = await workers.play(LONG, episode(), print)
            assert played.status == Terminated()
            await eventually(lambda: memory_of_parcels()[1] == 0)

    asyncio.run(main())


def test_a_receipt_that_comes_when_a_worker_has_ended_closes_no_descriptor_again() -> None:
    closings: list[int] = []

    async def play() -> None:
        closed = asyncio.get_running_loop().create_future()
        link: Any = SimpleNamespace(closed=closed, send=lambda message: None)
        engines: Any = SimpleNamespace(
            connecting=lambda start: nullcontext(), take=lambda message: False
        )
        parcel: Any = SimpleNamespace(close=lambda: closings.append(7))
        runner: Any = None
        playing = _Playing(0, engines, runner, parcels={7: parcel})
        playing.stopped.set()
        await playing.play_over(link)
        playing.take(Received(7))

    asyncio.run(play())
    assert closings == [7]
