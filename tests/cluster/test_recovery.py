"""A trainer that outlives its ranks: the run goes on at its step, with its weights."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.cluster.processes import start_local
from agentrl.cluster.workers import Worker, WorkerGroup
from agentrl.errors import StallError, WorkerDiedError
from agentrl.flow import Retries, run_virtual
from agentrl.protocols import Recovery
from agentrl.runs.checkpoint import Checkpoints
from agentrl.testing.trainers import LOSS, TrainerCase, random_batches
from agentrl.trainers.batch_shards import BatchShard
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.weights.store import SHARED_MEMORY
from tests.properties import examples


class Summing:
    """A rank whose weights are the list of its batches, each a single token."""

    def __init__(self) -> None:
        self.learned: list[int] = []
        self.saving = (Path(), "")

    def machine(self) -> str:
        return "this one"

    def reserve(self, loopback: bool) -> str:
        return "here"

    def open(self, world_size: int, address: str) -> None:
        """There is nothing to load."""

    def close(self) -> None:
        """There is nothing to leave."""

    def step(
        self, shard: BatchShard, loss: Any, normalizer: float, loss_tokens: int
    ) -> Mapping[str, float]:
        self.learned.append(int(shard[0][0].samples.tokens_S[1]))
        return {"steps": float(len(self.learned))}

    def weights(self) -> Any:
        return list(self.learned)

    def begin_save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.saving = (folder / "learned", json.dumps(self.learned))

    def saved(self) -> bool:
        path, learned = self.saving
        path.write_text(learned)
        return True

    def load(self, folder: Path) -> None:
        self.learned = json.loads((folder / "learned").read_text())


class Mortal:
    """The worker of a rank. It dies before or after the n-th call of any kind that is made to it
    and its successors.
    """

    def __init__(self, deaths: list[tuple[int, bool]], calls: list[int]) -> None:
        self.rank = Summing()
        self.deaths = deaths
        self.calls = calls
        self.dead = False

    async def call(self, method: str, *args: Any) -> Any:
        assert not self.dead, "a dead rank was asked"
        self.calls[0] += 1
        deaths = [after for at, after in self.deaths if at == self.calls[0]]
        result = getattr(self.rank, method)(*args) if not deaths or deaths[0] else None
        if deaths:
            self.dead = True
            raise WorkerDiedError("trainer", 1, "killed")
        return result

    async def check(self) -> None:
        """It says itself when it is dead."""

    async def stop(self) -> None:
        self.dead = True


def batch_of(token: int) -> TrainBatch:
    """A batch that can be told from others."""
    return collate([TrainingSample((0, token), (0, 1), (0.0, -1.0), (0.0, 1.0), (-1, 0), (0, 0))])


def trainer_over(make: Callable[[], Worker], **recovery: Any) -> LocalTrainer:
    """A trainer of one rank, which `make` makes."""

    async def start(role: str, of_rank: Any, count: int) -> WorkerGroup:
        return WorkerGroup(role, [make()])

    return LocalTrainer(
        LocalTrainer.Config(), Path(), total_steps=1, start=start, recovery=Recovery(**recovery)
    )


@examples(30)
@given(
    every=st.integers(1, 4),
    deaths=st.lists(
        st.tuples(st.integers(1, 40), st.booleans()), max_size=6, unique_by=lambda death: death[0]
    ),
)
def test_no_step_is_lost_or_made_twice_wherever_ranks_die(
    every: int, deaths: list[tuple[int, bool]]
) -> None:
    calls = [0]

    def trainer(checkpoints: Checkpoints) -> LocalTrainer:
        return trainer_over(lambda: Mortal(deaths, calls), latest=checkpoints.latest)

    async def main(checkpoints: Checkpoints) -> None:
        async with trainer(checkpoints) as first:
            for step in range(9):
                assert (await first.step(batch_of(step), LOSS, 1.0))["steps"] == step + 1.0
                assert await first.weights() == list(range(step + 1))
                if (step + 1) % every == 0:
                    await checkpoints.save(step + 1, first)
        async with trainer(checkpoints) as resumed:
            step, folder = checkpoints.latest() or (0, Path())
            await resumed.load(folder)
            await resumed.step(batch_of(99), LOSS, 1.0)
            assert await resumed.weights() == [*range(step), 99]

    # In memory, where there is some: on a disk each checkpoint waits for it a dozen times.
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=memory) as run,
        pytest.MonkeyPatch.context() as patched,
    ):
        # Between restarts a run waits for its machines, of which there are none here.
        patched.setattr(Retries, "pause", lambda failures: 0.0)
        asyncio.run(main(Checkpoints(Path(run) / "checkpoints")))


def test_ranks_that_take_up_a_checkpoint_that_is_no_runs_find_it_again_when_they_have_died(
    tmp_path: Path,
) -> None:
    (tmp_path / "learned").write_text("[7, 8]")
    calls = [0]

    async def main() -> list[int]:
        async with trainer_over(lambda: Mortal([(5, False)], calls)) as trainer:
            await trainer.load(tmp_path)
            await trainer.step(batch_of(9), LOSS, 1.0)  # address, open, load, step
            learned: Any = await trainer.weights()
            return list(learned)

    assert asyncio.run(main()) == [7, 8, 9]
    assert calls[0] > 5


def test_a_checkpoint_that_is_not_the_newest_is_not_taken_up(tmp_path: Path) -> None:
    (tmp_path / "learned").write_text("[]")

    async def main() -> None:
        async with trainer_over(
            lambda: Mortal([], [0]), latest=lambda: (4, tmp_path / "newer")
        ) as trainer:
            await trainer.load(tmp_path)

    with pytest.raises(ValueError, match="is not the newest checkpoint"):
        asyncio.run(main())


def test_ranks_that_die_too_often_end_the_run() -> None:
    deaths = [(at, False) for at in range(1, 100)]

    async def main() -> None:
        async with trainer_over(lambda: Mortal(deaths, calls), restarts=3) as trainer:
            await trainer.step(batch_of(0), LOSS, 1.0)

    calls = [0]
    said = (
        r"trainer 1 died: killed; all ranks were restarted 3 times in a row without a step in"
        r" between"
    )
    with pytest.raises(WorkerDiedError, match=said):
        run_virtual(main)
    assert calls == [4]


def test_a_reference_that_answers_between_the_deaths_of_its_ranks_goes_on() -> None:
    class DiesAfterwards(Mortal):
        async def call(self, method: str, *args: Any) -> Any:
            if self.dead:
                raise WorkerDiedError("reference", 0, "killed")
            self.dead = method == "predict"
            return args[0] if self.dead else await super().call(method, *args)

    made: list[DiesAfterwards] = []

    def make() -> DiesAfterwards:
        made.append(DiesAfterwards([], [0]))
        return made[-1]

    async def main() -> None:
        async with trainer_over(make, restarts=1) as trainer:
            for _ in range(10):
                await trainer.predict(batch_of(1))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "agentrl.trainers.group.gather", lambda batch, shards, predictions: predictions
        )
        asyncio.run(main())
    assert len(made) == 10


def test_ranks_that_hang_in_their_start_end_the_run_at_its_deadline() -> None:
    class Hanging(Mortal):
        async def call(self, method: str, *args: Any) -> Any:
            return await (asyncio.sleep(1e9) if method == "open" else super().call(method, *args))

    async def main() -> None:
        async with trainer_over(lambda: Hanging([], [0]), start_seconds=60):
            pytest.fail("it began")

    with pytest.raises(
        StallError, match=r"the trainer did not start within 60 s \(cluster.start_seconds\)"
    ):
        run_virtual(main)


def test_a_trainer_that_does_not_answer_ends_the_run_at_its_deadline() -> None:
    class Hanging(Mortal):
        async def call(self, method: str, *args: Any) -> Any:
            return await (
                asyncio.sleep(1e9) if method == "weights" else super().call(method, *args)
            )

    async def main() -> None:
        async with trainer_over(lambda: Hanging([], [0]), deadline=60) as trainer:
            await trainer.weights()

    with pytest.raises(StallError, match=r"60 s \(rollout.deadlines.train\)"):
        run_virtual(main)


@pytest.mark.parametrize(
    ("tokens", "limit", "given"), [(0, 3600, None), (10**6, 13_600, None), (10**6, 60, 60.0)]
)
def test_a_call_may_take_longer_the_more_tokens_it_is_about_unless_a_deadline_is_given(
    tokens: int, limit: float, given: float | None
) -> None:
    async def main(seconds: float) -> None:
        async with trainer_over(lambda: Mortal([], [0]), deadline=given) as trainer:
            await trainer._ask(lambda _: asyncio.sleep(seconds), tokens)

    run_virtual(lambda: main(limit - 1))
    with pytest.raises(StallError, match=rf"{limit} s \(rollout.deadlines.train\)"):
        run_virtual(lambda: main(limit + 1))


def test_ranks_that_die_while_the_run_is_stopped_are_not_started_again() -> None:
    class Deaf(Mortal):
        async def call(self, method: str, *args: Any) -> Any:
            if method != "weights":
                return await super().call(method, *args)
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:
                raise WorkerDiedError("trainer", 1, "killed by the same Ctrl-C") from None

    made: list[Deaf] = []

    def make() -> Deaf:
        made.append(Deaf([], [0]))
        return made[-1]

    async def train() -> None:
        async with trainer_over(make) as trainer:
            await trainer.weights()

    async def main() -> None:
        run = asyncio.create_task(train())
        await asyncio.sleep(1)
        ranks = len(made)
        run.cancel()
        await asyncio.wait({run}, timeout=1)
        assert run.cancelled()
        assert len(made) == ranks

    run_virtual(main)


@pytest.mark.slow
@pytest.mark.long
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
        return partial(
            kind,
            config,
            shallow_model_dir,
            total_steps=case.total_steps,
            temperature=case.temperature,
        )

    async def train(make: Any, faults: bool) -> Any:
        checkpoints = Checkpoints(tmp_path / f"checkpoints-{faults}")
        losses = []
        async with make(recovery=Recovery(checkpoints.latest)) as trainer:
            for step, batch in enumerate(batches):
                if faults and step in (1, 3):
                    os.kill(
                        groups[-1].workers[1].pid, signal.SIGKILL if step == 1 else signal.SIGSTOP
                    )
                losses.append(
                    (await trainer.step(batch, LOSS, float(batch.num_loss_tokens)))["loss"]
                )
                if step == 1:
                    await checkpoints.save(2, trainer)
            return losses, {
                name: weight.clone() for name, weight in (await trainer.weights()).items()
            }

    ranks = partial(trainer_of(FsdpTrainer, world_size=2), start=start)
    losses, weights = asyncio.run(train(ranks, faults=True))
    assert len(groups) == 3
    expected_losses, expected = asyncio.run(
        train(trainer_of(LocalTrainer, device="cpu"), faults=False)
    )
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)
