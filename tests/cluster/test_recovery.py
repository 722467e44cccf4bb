"""A trainer that outlives its ranks: the run goes on at its step, with its weights."""

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.checkpoint import Checkpoints
from agentrl.cluster.processes import start_local
from agentrl.cluster.recovery import RecoveringTrainer
from agentrl.errors import StallError, WorkerDiedError
from agentrl.flow import run_virtual
from agentrl.testing.trainers import LOSS, TrainerCase, random_batches
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from tests.properties import examples


class Summing:
    """A trainer whose weights are the list of its batches. It dies before or after its n-th call of any kind."""

    row_tokens = 8

    def __init__(self, deaths: list[tuple[int, bool]], calls: list[int]) -> None:
        self.deaths = deaths
        self.calls = calls
        self.learned: list[Any] = []
        self.dead = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.dead = True

    async def do(self, work: Any) -> Any:
        assert not self.dead, "a dead trainer was asked"
        self.calls[0] += 1
        deaths = [after for at, after in self.deaths if at == self.calls[0]]
        if deaths and not deaths[0]:
            raise WorkerDiedError("trainer", 1, "killed")
        result = work()
        if deaths:
            raise WorkerDiedError("trainer", 1, "killed")
        return result

    async def step(self, batch: Any, loss: Any, normalizer: float) -> Mapping[str, float]:
        return await self.do(lambda: self.learned.append(batch) or {"steps": float(len(self.learned))})

    async def weights(self) -> Any:
        return await self.do(lambda: list(self.learned))

    async def save(self, folder: Path) -> None:
        def write() -> None:
            folder.mkdir()
            (folder / "learned").write_text("\n".join(self.learned))

        await self.do(write)

    async def load(self, folder: Path) -> None:
        await self.do(lambda: self.learned.__setitem__(slice(None), (folder / "learned").read_text().split("\n")))


@examples(30)  # a checkpoint waits for the disk
@given(
    every=st.integers(1, 4),
    deaths=st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=6, unique_by=lambda death: death[0]),
)
def test_no_step_is_lost_or_made_twice_wherever_ranks_die(
    tmp_path_factory: pytest.TempPathFactory, every: int, deaths: list[tuple[int, bool]]
) -> None:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints")
    calls = [0]

    async def main() -> None:
        async with RecoveringTrainer(lambda: Summing(deaths, calls), checkpoints.latest) as trainer:
            for step in range(9):
                assert await trainer.step(f"batch {step}", LOSS, 1.0) == {"steps": step + 1.0}
                assert await trainer.weights() == [f"batch {number}" for number in range(step + 1)]
                if (step + 1) % every == 0:
                    await checkpoints.save(step + 1, trainer)
        async with RecoveringTrainer(lambda: Summing(deaths, calls), checkpoints.latest) as resumed:
            step, folder = checkpoints.latest() or (0, Path())
            await resumed.load(folder)
            await resumed.step("last", LOSS, 1.0)
            assert await resumed.weights() == [*(f"batch {number}" for number in range(step)), "last"]

    asyncio.run(main())
    shutil.rmtree(checkpoints.folder.parent)


def test_ranks_that_die_too_often_end_the_run() -> None:
    deaths = [(at, False) for at in range(1, 100)]

    async def main() -> None:
        async with RecoveringTrainer(lambda: Summing(deaths, calls), lambda: None, restarts=3) as trainer:
            await trainer.step("batch", LOSS, 1.0)

    calls = [0]
    with pytest.raises(WorkerDiedError, match="trainer 1 died: killed"):
        asyncio.run(main())
    assert calls == [4]


def test_a_trainer_that_does_not_answer_ends_the_run_at_its_deadline() -> None:
    class Hanging(Summing):
        async def weights(self) -> Any:
            await asyncio.sleep(1e9)

    async def main() -> None:
        async with RecoveringTrainer(lambda: Hanging([], [0]), lambda: None, deadline=60) as trainer:
            await trainer.weights()

    with pytest.raises(StallError, match=r"60 s \(rollout.deadlines.train\)"):
        run_virtual(main)


def test_ranks_that_die_while_the_run_is_stopped_are_not_started_anew() -> None:
    class Deaf(Summing):
        async def weights(self) -> Any:
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:
                raise WorkerDiedError("trainer", 1, "killed by the same Ctrl-C") from None

    made: list[Deaf] = []

    def make() -> Deaf:
        made.append(Deaf([], [0]))
        return made[-1]

    async def train() -> None:
        async with RecoveringTrainer(make, lambda: None) as trainer:
            await trainer.weights()

    async def main() -> None:
        run = asyncio.create_task(train())
        await asyncio.sleep(1)
        trainers = len(made)
        run.cancel()
        await asyncio.wait({run}, timeout=1)
        assert run.cancelled()
        assert len(made) == trainers

    run_virtual(main)


@pytest.mark.slow
def test_real_ranks_that_are_killed_and_stopped_cost_no_step_and_change_no_weight(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    batches = random_batches(shallow_model_dir, 4)
    case = TrainerCase(lr=1e-3)
    groups: list[Any] = []

    async def start(role: str, make: Any, count: int) -> Any:
        groups.append(await start_local(role, make, count, lease=3.0))
        return groups[-1]

    def trainer_of(kind: Any, **settings: Any) -> Any:
        config = kind.Config(**case.settings, **settings)
        return partial(kind, config, shallow_model_dir, total_steps=case.total_steps, temperature=case.temperature)

    async def train(make: Any, faults: bool) -> Any:
        checkpoints = Checkpoints(tmp_path / f"checkpoints-{faults}")
        losses = []
        async with RecoveringTrainer(make, checkpoints.latest) as trainer:
            for step, batch in enumerate(batches):
                if faults and step in (1, 3):
                    os.kill(groups[-1].workers[1].pid, signal.SIGKILL if step == 1 else signal.SIGSTOP)
                losses.append((await trainer.step(batch, LOSS, float(batch.num_loss_tokens)))["loss"])
                if step == 1:
                    await checkpoints.save(2, trainer)
            return losses, {name: weight.clone() for name, weight in (await trainer.weights()).items()}

    ranks = partial(trainer_of(FsdpTrainer, world_size=2), start=start)
    losses, weights = asyncio.run(train(ranks, faults=True))
    assert len(groups) == 3
    expected_losses, expected = asyncio.run(train(trainer_of(LocalTrainer, device="cpu"), faults=False))
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)
