"""What is left of an update whose ranks or engines die in the middle: each engine has one version
whole, whichever way the weights go, and the next version reaches all.
"""

import asyncio
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.cluster.processes import start_local
from agentrl.engines.local import LocalEngine
from agentrl.engines.router import Router
from agentrl.flow import Flow
from agentrl.protocols import Engine, Trainer
from agentrl.testing.trainers import LOSS, random_batches
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.weights import store as store_module
from agentrl.weights.bundle import Bucket, BundlePlace, WeightBundle
from agentrl.weights.config import WeightsConfig
from agentrl.weights.plan import SendingPlan, is_intact, pack, seal
from agentrl.weights.publisher import WeightPublisher, checksum
from agentrl.weights.shipment import Reader, Shipment
from agentrl.weights.transports import live
from tests.processes import PATIENCE_SECONDS, hit, still_alive

Weights = Mapping[str, Tensor]
LIVE = ["stream", "handles"]
KILL = signal.SIGKILL
SECONDS = 60.0
"""The deadline of what nobody should wait for to its end."""


@pytest.fixture(scope="module")
def model(shallow_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a dozen buckets of a MiB."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    shutil.copytree(shallow_model_dir, folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    config = AutoConfig.from_pretrained(shallow_model_dir)
    config.hidden_size, config.intermediate_size = 256, 1024
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where files are published; empty at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(store_module, "SHARED_MEMORY", Path(folder))
        monkeypatch.setattr(store_module, "default_parent", lambda: Path(folder))
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def own(engine: LocalEngine) -> dict[str, Tensor]:
    """What it samples from; tied weights under the first name."""
    names: dict[int, str] = {}
    for name, tensor in engine.weights.items():
        names.setdefault(tensor.data_ptr(), name)
    return {name: engine.weights[name] for name in names.values()}


def served(engine: LocalEngine) -> str:
    """The checksum of what it samples from."""
    return checksum(own(engine))


@dataclass
class Once:
    """Does something when so many weights have arrived at one of the engines: once."""

    act: Callable[[], None] | None = None
    after: int = 5

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Look at everything that arrives in this process."""
        arrivals = live.LiveShipment.arrivals

        def watched(shipment: Any, reader: Reader) -> Iterator[tuple[str, Tensor]]:
            for number, arrived in enumerate(arrivals(shipment, reader)):
                if number == self.after and self.act is not None:
                    act, self.act = self.act, None
                    act()
                yield arrived

        monkeypatch.setattr(live.LiveShipment, "arrivals", watched)


@dataclass
class Run:
    """Two engines that are replaced, two ranks, and a publisher between them."""

    router: Router
    publisher: WeightPublisher
    trainer: FsdpTrainer
    model: Path
    groups: list[Any]
    made: dict[int, LocalEngine]
    sums: dict[int, str] = field(default_factory=dict)
    steps: int = 0

    def kill(self, rank: int) -> None:
        """A rank dies at once."""
        hit(self.groups[-1].workers[rank].pid, KILL)

    async def publish(self, version: int) -> int:
        """Train a step and publish it; the number of attempts."""
        batch = random_batches(self.model, self.steps + 1)[-1]
        self.steps += 1
        await self.trainer.step(batch, LOSS, float(batch.num_loss_tokens))
        self.sums[version] = checksum(await self.trainer.weights())
        return (await self.publisher.publish(self.trainer, version)).attempts

    async def assert_all_serve(self, version: int) -> None:
        """Both engines, or their replacements, have this version, whole."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.router.worker_count().alive < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for engine in self.made.values():
            assert engine.policy_version == version
            assert served(engine) == self.sums[version]


@asynccontextmanager
async def run(model: Path, transport: str):  # type: ignore[no-untyped-def]
    """All of it, with version 1 published."""
    groups: list[Any] = []
    made: dict[int, LocalEngine] = {}

    async def start(role: str, make: Callable[[int], object], count: int) -> Any:
        groups.append(await start_local(role, make, count))
        return groups[-1]

    def engine(number: int) -> Engine:
        made[number] = LocalEngine(LocalEngine.Config(max_batch=4, max_context=64), model)
        return made[number]

    settings = WeightsConfig.model_validate(
        {"transport": transport, "bucket_mib": 1, "attempts": 3, "deadline": SECONDS}
    )
    config = FsdpTrainer.Config(world_size=2, lr=1e-2)
    trainer = FsdpTrainer(config, model, total_steps=20, start=start)
    router = Router([engine(0), engine(1)], factory=engine, update_seconds=4 * SECONDS)
    async with (
        trainer,
        router,
        WeightPublisher(router, config=settings) as publisher,
    ):
        running = Run(router, publisher, trainer, model, groups, made)
        await running.publish(1)
        await running.assert_all_serve(1)
        yield running
    pids = [worker.pid for group in groups for worker in group.workers]
    assert still_alive([pid for pid in pids if psutil.pid_exists(pid)], 60) == []


@pytest.mark.long
@pytest.mark.parametrize("transport", LIVE)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_bucket_leaves_one_version_whole(
    rank: int, transport: str, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Once()
    once.watch(monkeypatch)

    async def main() -> None:
        async with run(model, transport) as running:
            first = dict(running.made)
            once.act = lambda: running.kill(rank)
            await running.publish(2)
            await running.assert_all_serve(2)
            assert len(running.groups) == 2
            assert running.made != first  # those in the broken stream were replaced
            await running.publish(3)
            await running.assert_all_serve(3)

    asyncio.run(main())


@dataclass(frozen=True)
class Held:
    """`SendWeights` whose rank writes no file as long as there is a file `hold`."""

    send: Any
    hold: Path

    def __call__(self, source: Any) -> Any:
        write, hold = BundlePlace.write_bucket, self.hold

        def write_later(place: BundlePlace, number: int, weights: Any) -> Bucket:
            while hold.exists():
                threading.Event().wait(0.01)
            return write(place, number, weights)

        places: Any = BundlePlace
        places.write_bucket = write_later  # in this process
        return self.send(source)


@pytest.mark.long
@pytest.mark.parametrize("transport", LIVE)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_files_of_a_rank_killed_while_it_writes_them_are_written_by_the_next(
    rank: int, transport: str, model: Path, place: Path, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"

    async def main() -> None:
        async with run(model, transport) as running:
            send_weights: Any = running.trainer.send_weights

            async def send(send: Any) -> Any:
                return await send_weights(Held(send, hold))

            trainer: Any = running.trainer
            trainer.send_weights = send
            hold.touch()
            assert await running.publish(2) == 1
            await running.assert_all_serve(2)
            assert not list(place.glob("*/v2-*"))  # noqa: ASYNC240
            running.kill(rank)
            hold.unlink()
            (sent,) = set(running.publisher._served.values())
            at_rest = await sent.at_rest()
            assert len(running.groups) == 2
            assert checksum(WeightBundle.open(at_rest.folder)) == running.sums[2]
            await running.publish(3)
            await running.assert_all_serve(3)

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.parametrize("transport", LIVE)
def test_an_engine_that_dies_in_the_middle_is_replaced_by_one_with_the_version(
    transport: str, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Once()
    once.watch(monkeypatch)
    monkeypatch.setattr(live, "_LEASE_SECONDS", 600.0)

    def break_down() -> None:
        raise RuntimeError("the device is gone")

    async def main() -> None:
        async with run(model, transport) as running:
            first = dict(running.made)
            once.act = break_down
            await running.publish(2)
            await running.assert_all_serve(2)
            replaced = [number for number in first if running.made[number] is not first[number]]
            assert len(replaced) >= 1
            if transport == "handles":
                assert len(replaced) == 1
            assert len(running.groups) == 1
            await running.publish(3)
            await running.assert_all_serve(3)

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.parametrize("transport", LIVE)
@pytest.mark.parametrize(("when", "rank"), [("stage", 0), ("deliver", 0), ("deliver", 1)])
def test_a_rank_killed_before_anything_is_sent_costs_an_attempt_and_no_engine(
    when: str, rank: int, transport: str, model: Path, place: Path
) -> None:
    async def main() -> None:
        async with run(model, transport) as running:
            first = dict(running.made)
            tried: list[int] = []

            def kill_once() -> None:
                if not tried:
                    running.kill(rank)
                for engine in first.values():
                    assert (engine.policy_version, served(engine)) == (1, running.sums[1])
                tried.append(rank)

            sends: Any = running.publisher._transport
            send, deliver = sends.send, sends.deliver

            async def send_and_kill(trainer: Trainer, version: int) -> Shipment:
                sent: Shipment = await send(trainer, version)
                kill_once()
                return sent

            async def kill_and_deliver(trainer: Trainer, shipment: Shipment) -> None:
                kill_once()
                await deliver(trainer, shipment)

            with pytest.MonkeyPatch.context() as patched:
                if when == "stage":
                    patched.setattr(sends, "send", send_and_kill)
                else:
                    patched.setattr(sends, "deliver", kill_and_deliver)
                assert await running.publish(2) == 2
            assert len(tried) == 2
            await running.assert_all_serve(2)
            assert running.made == first
            await running.publish(3)
            await running.assert_all_serve(3)

    asyncio.run(main())


def weights_of(engine: LocalEngine, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(weight.shape, generator=generator) for name, weight in own(engine).items()
    }


class Holds(Trainer):
    """A trainer that has these weights."""

    def __init__(self, weights: Weights) -> None:
        self.now = weights

    async def weights(self) -> Weights:
        return self.now


@pytest.mark.parametrize("transport", LIVE)
def test_an_update_that_is_cancelled_leaves_an_engine_with_the_version_that_it_says(
    transport: str, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Once()
    once.watch(monkeypatch)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        sends = live.LiveTransport(
            WeightsConfig(transport=transport, bucket_mib=1, deadline=SECONDS),
            transport,  # type: ignore[arg-type]
        )
        config = LocalEngine.Config(max_batch=4, max_context=64)
        async with LocalEngine(config, model) as engine:
            weights = weights_of(engine, 1)
            trainer = Holds(weights)  # type: ignore[abstract]
            sent = await sends.send(trainer, 1)
            await engine.stage_weights(sent, 1)
            async with Flow("update") as flow:
                flow.start(sends.deliver(trainer, sent), name="deliver")
                update = flow.start(engine.update_weights(sent, 1), name="update")
                once.act = lambda: loop.call_soon_threadsafe(update.cancel)  # type: ignore[assignment]
                await asyncio.wait({update})
            assert update.cancelled()
            assert engine.policy_version == 1
            assert served(engine) == checksum(weights)
        sends.close()

    asyncio.run(main())


@pytest.mark.parametrize("transport", LIVE)
def test_an_engine_that_is_closed_after_it_has_staged_is_not_waited_for(
    transport: str, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LEASE_SECONDS", 600.0)

    async def main() -> None:
        settings = WeightsConfig(transport=transport, bucket_mib=1, deadline=PATIENCE_SECONDS)
        sends = live.LiveTransport(settings, transport)  # type: ignore[arg-type]
        async with LocalEngine(LocalEngine.Config(max_batch=4, max_context=64), model) as engine:
            trainer = Holds(weights_of(engine, 1))  # type: ignore[abstract]
            sent = await sends.send(trainer, 1)
            await engine.stage_weights(sent, 1)
        async with asyncio.timeout(PATIENCE_SECONDS / 2):
            await sends.deliver(trainer, sent)
        assert checksum(await sent.at_rest()) == checksum(trainer.now)
        sends.close()

    asyncio.run(main())


def test_a_bucket_in_the_place_of_another_is_noticed() -> None:
    """A reader of handles that was stopped for longer than it is waited for finds a later one."""

    async def units() -> SendingPlan:
        from agentrl.protocols.weight_source import WholeWeights

        weights = {f"w{i}": torch.full((8,), float(i)) for i in range(2)}
        return SendingPlan.of(WholeWeights(weights).units, 1, torch.float32)

    plan = asyncio.run(units())
    first, second = plan.buckets
    assert first.size == second.size
    buffer = torch.empty(plan.largest, dtype=torch.uint8)
    pack({"w1": torch.ones(8)}, second, torch.float32, buffer)
    seal(second, buffer, "v1-0/1")
    assert is_intact(buffer, second, "v1-0/1")
    assert not is_intact(buffer, first, "v1-0/0")
    assert not is_intact(buffer, second, "v2-1/1")
