"""What dies while engine and trainer take turns on their devices is started again at its turn: the
two are never awake at once, and the run goes on with what it would have had.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.assembly import PlacedCluster
from agentrl.assembly import device_sharing as device_sharing_of
from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.cluster.processes import start_local
from agentrl.cluster.workers import Make, Worker, WorkerGroup
from agentrl.engines.local import LocalEngine
from agentrl.engines.router import Router
from agentrl.errors import EngineDeadError, WorkerDiedError
from agentrl.flow import Flow, run_virtual
from agentrl.placement.time_share import TimeSharing
from agentrl.protocols import Engine, GenerateRequest, Trainer
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.testing.trainers import LOSS, random_batches
from agentrl.tokens.arrays import ints
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trajectory import Completion

Side = Literal["engine", "trainer"]
STEPS = 3
START_SECONDS = 90.0
"""Of a fake: longer than a switch may take."""
SWITCH_SECONDS = 60.0


@dataclass
class Witness:
    """Knows what takes memory as only one side may: what is awake, or starts, or is not gone."""

    awake: dict[Side, set[object]] = field(
        default_factory=lambda: {"engine": set(), "trainer": set()}
    )
    starts: dict[Side, int] = field(default_factory=lambda: {"engine": 0, "trainer": 0})
    trained: int = 0
    """Steps of the trainer, and the version that no request may be computed without."""
    weights_alone: set[object] = field(default_factory=set)
    """Engines of which only the weights are awake."""

    def note_weights(self, who: object) -> None:
        self.weights_alone.add(who)

    def note_version(self, version: int) -> None:
        """An engine begins to compute requests: those that waited, and new ones."""
        assert version == self.trained, f"requests are computed under {version}"

    def note_awake(self, side: Side, who: object) -> None:
        self.awake[side].add(who)
        assert not (self.awake["engine"] and self.awake["trainer"]), f"{side} wakes beside another"

    def note_start(self, side: Side, who: object) -> None:
        assert not self.weights_alone, f"{side} starts beside an engine's weights"
        self.starts[side] += 1
        self.note_awake(side, who)

    def note_asleep(self, side: Side, who: object) -> None:
        self.awake[side].discard(who)
        self.weights_alone.discard(who)


class MortalEngine(ScriptedEngine):
    """An engine that can be killed. Its tokens are one a second, each the number of those before
    it.
    """

    def __init__(self, witness: Witness) -> None:
        super().__init__(
            lambda tokens: [10.0 * (i == len(tokens)) for i in range(100)],
            seconds_per_token=lambda request: 1.0,
        )
        self.witness = witness
        self.is_dead = False
        self.is_awake = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.witness.note_start("engine", self)
        await asyncio.sleep(START_SECONDS)
        self.is_awake.set()
        return await super().__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.sleep(3)  # until its memory is free
        self.witness.note_asleep("engine", self)
        await super().__aexit__(*exc)

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.is_awake.wait()
        self._check_alive()
        return await super().generate(request)

    async def probe(self) -> None:
        self._check_alive()

    async def sleep(self) -> None:
        await self._switch()
        self.is_awake.clear()
        self.witness.note_asleep("engine", self)

    async def wake_weights(self) -> None:
        self._check_alive()
        self.witness.note_weights(self)
        await asyncio.sleep(2)
        self._check_alive()

    async def wake(self) -> None:
        self.witness.note_awake("engine", self)
        await self._switch()
        self.witness.note_version(self.policy_version)
        self.witness.weights_alone.discard(self)
        self.is_awake.set()

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._check_alive()
        await asyncio.sleep(1)
        self._check_alive()
        await super().update_weights(weights, version)

    def die(self) -> None:
        self.is_dead = True
        self.is_awake.set()
        self._end_all(lambda: EngineDeadError("killed"))

    async def _switch(self) -> None:
        self._check_alive()
        await asyncio.sleep(2)
        self._check_alive()

    def _check_alive(self) -> None:
        if self.is_dead:
            raise EngineDeadError("killed")


class MortalRank:
    """The worker of a rank that can be killed. Its weights are the batches that it has learned."""

    SECONDS: Mapping[str, float] = {
        "open": START_SECONDS,
        "sleep": 2,
        "wake": 2,
        "free_step_memory": 2,
        "step": 5,
    }

    def __init__(self, witness: Witness) -> None:
        self.witness = witness
        self.learned: list[int] = []
        self.is_dead = False
        witness.note_start("trainer", self)

    async def call(self, method: str, *args: Any) -> Any:
        self._check_alive()
        if method == "wake":
            self.witness.note_awake("trainer", self)
        await asyncio.sleep(self.SECONDS.get(method, 0.5))
        self._check_alive()
        match method:
            case "step":
                assert self in self.witness.awake["trainer"]
                self.learned.append(int(args[0][0][0].samples.tokens_S[1]))
                return {"steps": float(len(self.learned))}
            case "sleep":
                self.witness.note_asleep("trainer", self)
            case "free":
                assert not self.witness.awake["engine"]
                return 1 << 40
        return list(self.learned) if method == "weights" else True

    async def check(self) -> None:
        self._check_alive()

    async def stop(self) -> None:
        self.is_dead = True
        await asyncio.sleep(1)  # until its memory is free
        self.witness.note_asleep("trainer", self)

    def _check_alive(self) -> None:
        if self.is_dead:
            raise WorkerDiedError("trainer", 0, "killed")


@dataclass
class Fakes:
    """The mortals of a run so far."""

    witness: Witness = field(default_factory=Witness)
    engines: list[MortalEngine] = field(default_factory=list)
    ranks: list[MortalRank] = field(default_factory=list)

    def engine(self, number: int = 0) -> Engine:
        self.engines.append(MortalEngine(self.witness))
        return self.engines[-1]

    async def start(self, role: str, make: Make, count: int) -> WorkerGroup:
        self.ranks.append(MortalRank(self.witness))
        return WorkerGroup(role, [self.ranks[-1]])

    def kill(self, side: Side) -> None:
        if side == "trainer":
            self.ranks[-1].is_dead = True
        else:
            next(engine for engine in self.engines if not engine.is_dead).die()


def batch_of(token: int) -> TrainBatch:
    """A batch that can be told from others."""
    two_of, twice = np.ones(2, np.float32), np.zeros(2, np.int32)
    return collate(
        [TrainingSample(ints((0, token)), np.array([False, True]), -two_of, two_of, twice, twice)]
    )


def sharing(
    engine: Router, trainer: Trainer, switch_seconds: float = SWITCH_SECONDS
) -> AbstractAsyncContextManager[TimeSharing]:
    """The production's way of taking turns, on a device that has room for one of them."""
    awake = {
        "engine": SimpleNamespace(to_wake=1, parts={"weights": 1}),
        "trainer": SimpleNamespace(to_wake=1),
    }
    plan = SimpleNamespace(
        devices=SimpleNamespace(time_shared=True),
        loads=(SimpleNamespace(awake=awake),),
        tight=None,
    )
    config = SimpleNamespace(
        placement=SimpleNamespace(switch_seconds=switch_seconds),
        weights=SimpleNamespace(update="keep"),
    )
    placed = PlacedCluster(cast(Any, config), cast(Any, None), cast(Any, plan))
    return cast(Any, device_sharing_of(placed, [engine], [trainer]))


@pytest.fixture
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the virtual clock, which waits for no thread: what would run in one runs at once."""

    async def to_thread(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return call(*args, **options)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)


def request(name: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(
        name, ints((1, 2)), SamplingParams(max_tokens=tokens, temperature=0.0), seed=7
    )


async def take_steps(
    fakes: Fakes, replicas: int, at_step_1: Callable[[str, TimeSharing], Awaitable[None]]
) -> None:
    """A run of three steps. Calls `at_step_1` with each moment of the second one."""
    engines = [fakes.engine() for _ in range(replicas)]
    trainer = LocalTrainer(LocalTrainer.Config(), Path(), total_steps=STEPS, start=fakes.start)
    answers: list[asyncio.Task[Completion]] = []
    async with (
        Router(engines, factory=fakes.engine, lease=3) as router,
        sharing(router, trainer) as share,
        Flow("requests") as flow,
    ):

        async def reach(moment: str, step: int) -> None:
            if step == 1:
                await at_step_1(moment, share)

        for step in range(STEPS):
            # Some end before the switch, and some are frozen by it.
            for tokens in (4, 9, 40):
                asked = request(f"{step}/{tokens}", tokens)
                answers.append(flow.start(router.generate(asked), name=asked.id))
            await answers[-3]
            await reach("generating", step)
            async with share.training():
                await reach("training", step)
                assert await trainer.step(batch_of(step), LOSS, 1.0) == {
                    "steps": step + 1.0,
                    "tokens": 2.0,
                    "tokens_computed": 2.0,
                }
                fakes.witness.trained = step + 1
                async with share.updating():
                    await reach("updating", step)
                    weights: Any = await trainer.weights()
                    assert weights == list(range(step + 1))
                    await reach("sending", step)
                    await router.stage_weights(weights, step + 1)
                    await router.update_weights(weights, step + 1)
                assert share.state == "generating"
            assert router.policy_version == step + 1
    for number, answer in enumerate(answers):
        tokens = (4, 9, 40)[number % 3]
        assert answer.result().token_ids.tolist() == list(range(2, 2 + tokens))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("after", [None, 1.0, 3.0])
@pytest.mark.parametrize("moment", ["generating", "training", "updating", "sending"])
@pytest.mark.parametrize("side", ["engine", "trainer"])
@pytest.mark.usefixtures("without_threads")
def test_what_dies_in_a_turn_or_a_switch_is_started_again_at_its_turn(
    side: Side, moment: str, after: float | None, replicas: int
) -> None:
    """It dies at the moment, or so many seconds after the switch that follows it has begun."""
    fakes = Fakes()

    async def main() -> None:
        async with Flow("killer") as killer:

            async def kill_in_switch(share: TimeSharing) -> None:
                while share.state != "switching":  # noqa: ASYNC110  it says so to nobody
                    await asyncio.sleep(0.1)
                await asyncio.sleep(after or 0.0)
                assert share.state == "switching"
                fakes.kill(side)

            async def at_step_1(reached: str, share: TimeSharing) -> None:
                if reached != moment:
                    return
                if after is None:
                    fakes.kill(side)
                else:
                    killer.start(kill_in_switch(share), name="kill")

            await take_steps(fakes, replicas, at_step_1)

    run_virtual(main)
    expected = {"engine": replicas, "trainer": 1}
    expected[side] += 1
    assert fakes.witness.starts == expected


@pytest.mark.usefixtures("without_threads")
def test_a_trainer_asked_for_its_checkpoint_after_its_death_takes_a_turn_beside_the_run() -> None:
    """What writes checkpoints asks beside the driver, which begins a turn of its own meanwhile."""
    fakes = Fakes()

    async def main() -> None:
        trainer = LocalTrainer(LocalTrainer.Config(), Path(), total_steps=STEPS, start=fakes.start)
        async with (
            Router([fakes.engine()], factory=fakes.engine) as router,
            sharing(router, trainer) as share,
            Flow("checkpoint") as flow,
        ):
            async with share.training():
                await trainer.step(batch_of(0), LOSS, 1.0)
            fakes.kill("trainer")
            asked = flow.start(trainer.weights(), name="weights")
            await asyncio.sleep(1.5)  # it takes a second to end the dead
            assert share.state == "switching"
            async with share.training():
                await trainer.step(batch_of(1), LOSS, 1.0)
                assert asked.done()
                assert fakes.witness.awake["trainer"]
            assert fakes.witness.awake["engine"]
            weights: Any = asked.result()
            assert weights in ([0], [0, 1])
            assert await router.generate(request("after", 3))

    run_virtual(main)
    assert fakes.witness.starts == {"engine": 1, "trainer": 2}


@pytest.mark.usefixtures("without_threads")
def test_ranks_that_die_asleep_sleep_again_after_they_were_needed() -> None:
    fakes = Fakes()

    async def main() -> None:
        async with LocalTrainer(
            LocalTrainer.Config(), Path(), total_steps=STEPS, start=fakes.start
        ) as trainer:
            await trainer.step(batch_of(0), LOSS, 1.0)
            await trainer.sleep()
            fakes.kill("trainer")
            assert await trainer.free() is None  # and nothing is started for that
            weights: Any = await trainer.weights()
            assert weights == [0]
            assert not fakes.witness.awake["trainer"]

    run_virtual(main)
    assert fakes.witness.starts["trainer"] == 2


# Real ones


class MortalLocalEngine(LocalEngine):
    """A local engine that can be killed, seen by a witness."""

    witness: Witness
    is_dead = False

    async def __aenter__(self) -> Self:
        self.witness.note_start("engine", self)
        return await super().__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        self.witness.note_asleep("engine", self)

    async def sleep(self) -> None:
        await super().sleep()
        self.witness.note_asleep("engine", self)

    async def wake_weights(self) -> None:
        self.witness.note_weights(self)
        await super().wake_weights()

    async def wake(self) -> None:
        self.witness.note_awake("engine", self)
        self.witness.note_version(self.policy_version)
        self.witness.weights_alone.discard(self)
        await super().wake()

    def die(self) -> None:
        self.is_dead = True
        self._closed = "killed"
        self._fail_all(EngineDeadError("killed"))


@dataclass
class WitnessedRank:
    """A worker in a process or a thread of its own, seen by a witness."""

    worker: Any
    witness: Witness
    is_dead: bool = False

    def kill(self) -> None:
        if hasattr(self.worker, "pid"):
            os.kill(self.worker.pid, signal.SIGKILL)
        else:  # nothing can kill a thread
            self.is_dead = True

    async def call(self, method: str, *args: Any) -> Any:
        if self.is_dead:
            raise WorkerDiedError("trainer", 0, "killed")
        if method == "wake":
            self.witness.note_awake("trainer", self.worker)
        result = await self.worker.call(method, *args)
        if method == "sleep":
            self.witness.note_asleep("trainer", self.worker)
        return result

    async def check(self) -> None:
        await self.worker.check()

    async def stop(self) -> None:
        await self.worker.stop()
        self.witness.note_asleep("trainer", self.worker)


@dataclass
class RealRun:
    """Three steps of a local engine and a trainer."""

    model: Path
    witness: Witness = field(default_factory=Witness)
    engines: list[MortalLocalEngine] = field(default_factory=list)
    groups: list[WorkerGroup] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def engine(self, number: int = 0) -> Engine:
        engine = MortalLocalEngine(
            LocalEngine.Config(device="cpu", max_batch=4, max_context=64), self.model
        )
        engine.witness = self.witness
        self.engines.append(engine)
        return engine

    async def start(self, role: str, make: Make, count: int) -> WorkerGroup:
        self.witness.starts["trainer"] += 1
        group = await start_local(role, make, count)
        for worker in group.workers:
            self.witness.note_awake("trainer", worker)
        ranks: list[Worker] = [WitnessedRank(worker, self.witness) for worker in group.workers]
        self.groups.append(WorkerGroup(role, ranks))
        return self.groups[-1]

    def trainer(self, ranks: int) -> Trainer:
        if ranks == 1:
            config = LocalTrainer.Config(device="cpu", lr=1e-3)
            return LocalTrainer(config, self.model, total_steps=STEPS, start=self.start)
        sharded = FsdpTrainer.Config(world_size=ranks, lr=1e-3)
        return FsdpTrainer(sharded, self.model, total_steps=STEPS, start=self.start)

    def kill(self, side: str) -> None:
        if side == "engine":
            self.engines[-1].die()
        else:
            rank: Any = self.groups[-1].workers[-1]
            rank.kill()

    async def kill_in_switch(self, side: str, share: TimeSharing) -> None:
        while share.state != "switching":  # noqa: ASYNC110  it says so to nobody
            await asyncio.sleep(0)
        self.kill(side)

    async def take_steps(self, trainer: Trainer, side: str = "", moment: str = "") -> None:
        """One side dies at a moment of the second step."""
        async with (
            Router([self.engine()], factory=self.engine) as router,
            sharing(router, trainer) as share,
            Flow("killer") as killer,
        ):
            for step, batch in enumerate(random_batches(self.model, STEPS)):
                moment_now = moment if step == 1 else ""
                async with Flow("requests") as flow:
                    asked = [
                        flow.start(router.generate(request(f"{step}/{n}", 8)), name=str(n))
                        for n in range(3)
                    ]
                    if moment_now == "generating":
                        await asyncio.sleep(0)
                        self.kill(side)
                self.tokens += [task.result().token_ids.tolist() for task in asked]
                if moment_now == "to training":
                    killer.start(self.kill_in_switch(side, share), name="kill")
                async with share.training():
                    if moment_now == "training":
                        self.kill(side)
                    await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
                    self.witness.trained = step + 1
                    if moment_now == "to updating":
                        killer.start(self.kill_in_switch(side, share), name="kill")
                    async with share.updating():
                        if moment_now == "updating":
                            self.kill(side)
                        weights = await trainer.weights()
                        self.weights = {name: weight.clone() for name, weight in weights.items()}
                        await router.update_weights(weights, step + 1)
                        if moment_now == "to generating":
                            killer.start(self.kill_in_switch(side, share), name="kill")


@pytest.mark.parametrize(
    ("side", "moment", "ranks"),
    [
        pytest.param("engine", "training", 1, marks=pytest.mark.slow),
        pytest.param("trainer", "to generating", 1, marks=pytest.mark.slow),
        pytest.param("engine", "updating", 1, marks=pytest.mark.slow),
        pytest.param("trainer", "updating", 1, marks=pytest.mark.slow),
        *[
            pytest.param(side, moment, 2, marks=pytest.mark.long)  # that meet by gloo
            for side in ("engine", "trainer")
            for moment in (
                *("generating", "to training", "training"),
                *("to updating", "updating", "to generating"),
            )
        ],
    ],
)
def test_real_engines_and_ranks_that_die_in_turns_change_no_token_and_no_weight(
    side: str, moment: str, ranks: int, shallow_model_dir: Path
) -> None:
    run, undisturbed = RealRun(shallow_model_dir), RealRun(shallow_model_dir)
    asyncio.run(run.take_steps(run.trainer(ranks), side, moment))
    assert run.witness.starts == {
        "engine": 1 + (side == "engine"),
        "trainer": 1 + (side == "trainer"),
    }
    asyncio.run(undisturbed.take_steps(undisturbed.trainer(1)))
    assert run.tokens == undisturbed.tokens
    for name, weight in run.weights.items():
        torch.testing.assert_close(weight, undisturbed.weights[name], atol=1e-5, rtol=0)
