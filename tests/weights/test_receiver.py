"""Weights for engines on machines that do not see where the trainer's lie."""

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from agentrl.cluster.ray_engine import RayEngine
from agentrl.cluster.ray_placement import Unplaced
from agentrl.cluster.ray_receivers import RayReceivers
from agentrl.engines.local import LocalEngine
from agentrl.engines.router import Router
from agentrl.errors import WeightsError
from agentrl.flow import Flow
from agentrl.plugins import Component
from agentrl.protocols import GenerateRequest
from agentrl.sandbox import kernel
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.trainers import LOSS, random_batches
from agentrl.trainers.local import LocalTrainer
from agentrl.weights import bundle as bundles
from agentrl.weights import receiver
from agentrl.weights.bundle import BundlePlace, WeightBundle
from agentrl.weights.config import WeightsConfig
from agentrl.weights.publisher import WeightPublisher
from agentrl.weights.receiver import BundleReceiver
from agentrl.weights.store import SHARED_MEMORY
from tests.cluster.shared_ray import join_shared_ray

PIECE_BYTES = 500


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "PIECE_BYTES", PIECE_BYTES)


def written(folder: Path, version: int = 1) -> WeightBundle:
    folder.mkdir(exist_ok=True)
    weights = {f"w{i}": torch.arange(100.0) + version + i for i in range(5)}
    return BundlePlace(folder / f"v{version}", version, bucket_bytes=800).write(weights)


class Sender:
    """Reads pieces, as a receiver on the other machine does."""

    def __init__(self) -> None:
        self.asked: list[tuple[Path, int, int]] = []
        self.damages = 0
        """Pieces that still come with another last byte."""
        self.open = threading.Event()
        """Pieces come while it is set."""
        self.open.set()

    def read(self, path: Path, offset: int, size: int) -> Any:
        self.asked.append((path, offset, size))

        def content() -> bytes:
            self.open.wait()
            piece = path.read_bytes()[offset : offset + size]
            if self.damages:
                self.damages -= 1
                piece = piece[:-1] + bytes([piece[-1] ^ 1])
            return piece

        return asyncio.get_running_loop().run_in_executor(None, content)


def files(folder: Path) -> list[str]:
    """What is there beside the stores themselves."""
    return sorted(path.name for store in folder.iterdir() for path in store.iterdir())


def test_a_copy_is_fetched_once_for_all_engines_in_a_few_pieces_at_a_time(tmp_path: Path) -> None:
    there = written(tmp_path / "there")
    here = BundleReceiver(tmp_path / "here")

    async def main() -> None:
        sender = Sender()
        sender.open.clear()
        async with Flow("engines") as flow:
            asked = [flow.start(here.receive(there, sender.read), name=str(i)) for i in range(3)]
            while len(sender.asked) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert len(sender.asked) == 2, "no third one before the first is written"
            sender.open.set()
        copies = [task.result() for task in asked]
        assert copies == [copies[0]] * 3
        assert copies[0].folder != there.folder
        assert all(torch.equal(copies[0][name], there[name]) for name in there)
        sizes = [size for _, _, size in sender.asked]
        assert sum(sizes) == there.size, "each byte once"
        assert max(sizes) == PIECE_BYTES, "a file comes in pieces"
        assert await here.receive(there, sender.read) == copies[0]
        assert len(sender.asked) == len(sizes), "it is there already"

    asyncio.run(main())
    here.close()
    assert list((tmp_path / "here").iterdir()) == []


def test_copies_stay_while_they_are_wanted_and_while_they_arrive(tmp_path: Path) -> None:
    first, second = [written(tmp_path / "there", version) for version in (1, 2)]
    here = BundleReceiver(tmp_path / "here")

    async def main() -> None:
        sender = Sender()
        await here.receive(first, sender.read)
        sender.open.clear()
        async with Flow("engine") as flow:
            arriving = flow.start(here.receive(second, sender.read), name="0")
            await asyncio.sleep(0)
            await here.keep_only({first.checksum})
            sender.open.set()
        arriving.result().check()
        assert len(files(tmp_path / "here")) == 2
        await here.keep_only({second.checksum})
        assert files(tmp_path / "here") == [arriving.result().folder.name]
        await here.keep_only(())
        assert files(tmp_path / "here") == []

    asyncio.run(main())
    here.close()


def test_a_copy_that_arrived_damaged_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    there = written(tmp_path / "there")
    here = BundleReceiver(tmp_path / "here")

    async def main() -> None:
        sender = Sender()
        sender.damages = 1
        with pytest.raises(WeightsError, match="damaged on their way"):
            await here.receive(there, sender.read)
        assert files(tmp_path / "here") == []
        (await here.receive(there, sender.read)).check()

    asyncio.run(main())
    here.close()


def test_what_the_receiver_has_checked_is_read_again_only_after_it_was_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = written(tmp_path / "there")
    here = BundleReceiver(tmp_path / "here")
    read: list[str] = []
    checksum_of = bundles._file_checksum

    def counted(path: Path) -> str:
        read.append(path.name)
        return checksum_of(path)

    async def main() -> None:
        sender = Sender()
        copy = await here.receive(there, sender.read)
        monkeypatch.setattr(bundles, "_file_checksum", counted)
        WeightBundle.open(copy.folder)
        assert read == []
        there.check()
        assert len(read) == len(there.manifest.files), "nobody else says that it was checked"
        bucket = copy.folder / copy.manifest.files[0]
        content = bucket.read_bytes()
        bucket.write_bytes(content[:-1] + b"?")
        os.utime(bucket, ns=(0, 0))
        with pytest.raises(WeightsError, match="damaged"):
            WeightBundle.open(copy.folder)
        again = await here.receive(there, sender.read)
        assert again.folder != copy.folder
        again.check()

    asyncio.run(main())
    here.close()


class FarEngine(LocalEngine):
    """Lives where a folder is not seen that its machine has: mounts over it, for its thread and
    those it starts.
    """

    class Config(LocalEngine.Config):
        hidden: Path

    async def __aenter__(self) -> Self:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", str(self._config.hidden), "tmpfs")  # type: ignore[attr-defined]
        return await super().__aenter__()

    async def stage_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        assert isinstance(weights, WeightBundle)
        assert weights.folder.parent.parent == SHARED_MEMORY
        (self._config.hidden.parent / "stores" / weights.folder.parent.name).touch()  # type: ignore[attr-defined]
        assert list(self._config.hidden.iterdir()) == []  # type: ignore[attr-defined]
        if (self._config.hidden.parent / "damage").exists():  # type: ignore[attr-defined]
            bucket = weights.folder / weights.manifest.buckets[0].file
            bucket.write_bytes(bucket.read_bytes()[:-1] + b"?")
        await super().stage_weights(weights, version)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a folder from a process")
def test_engines_that_do_not_see_the_files_get_one_copy_for_all_of_them(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    join_shared_ray()
    published, stores = tmp_path / "published", tmp_path / "stores"
    published.mkdir()
    stores.mkdir()
    config = FarEngine.Config(max_batch=2, max_context=64, device="cpu", hidden=published)
    request = GenerateRequest("r", (7, 8, 9), SamplingParams(max_tokens=8, temperature=0.0))

    async def main() -> None:
        receivers = RayReceivers()
        far = [
            RayEngine(
                Component("far", FarEngine, config),
                shallow_model_dir,
                Unplaced().options("engine", number),
                receivers,
            )
            for number in range(2)
        ]
        near = LocalEngine(
            LocalEngine.Config(max_batch=2, max_context=64, device="cpu"), shallow_model_dir
        )
        settings = LocalTrainer.Config(lr=0.05, device="cpu")
        places = WeightsConfig(transport="disk", folder=published, bucket_mib=1)
        async with (
            Router(far) as router,
            near,
            LocalTrainer(settings, shallow_model_dir, total_steps=9) as trainer,
            WeightPublisher(router, config=places) as publisher,
        ):
            for version, batch in enumerate(random_batches(shallow_model_dir, 2), 1):
                await trainer.step(batch, LOSS, 10.0)
                new = (await publisher.publish(trainer, version)).weights
                assert isinstance(new, WeightBundle)
                await near.update_weights(new, version)
                expected = await near.generate(request)
                for engine in far:
                    got = await engine.generate(request)
                    assert got.token_ids.tolist() == expected.token_ids.tolist()
                    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
                    assert set(got.policy_versions) == {version}
            (tmp_path / "damage").touch()
            with pytest.raises(WeightsError, match="damaged"):
                await publisher.publish(trainer, 3)
            (tmp_path / "damage").unlink()
            assert {engine.policy_version for engine in far} == {2}
            await publisher.publish(trainer, 3)
            assert {engine.policy_version for engine in far} == {3}

        await receivers.close()

    asyncio.run(main())
    made = [SHARED_MEMORY / store.name for store in stores.iterdir()]
    assert len(made) == 1, "one for both far engines"
    assert [store for store in made if store.exists()] == []


@pytest.mark.slow
def test_what_ranks_wrote_on_their_machine_is_read_from_there_until_it_is_released(
    tmp_path: Path,
) -> None:
    join_shared_ray()
    there = written(tmp_path / "there")

    async def main() -> list[Path]:
        receivers = RayReceivers()
        machine = receivers.own_name()
        place = await receivers.place(machine, 1, 800)
        assert place.folder.parent.parent == SHARED_MEMORY
        for bucket in there.manifest.buckets:  # as a rank does
            content = (there.folder / bucket.file).read_bytes()
            place.add(bucket, memoryview(content), is_last=True)
        sent = await receivers.finish(place, there.manifest)
        sent.check()
        copy = await receivers.bring(sent, machine, "engine")
        assert copy.folder.parent != sent.folder.parent
        assert all(torch.equal(copy[name], there[name]) for name in there)
        await receivers.keep_sent([sent])
        assert sent.folder.exists()
        await receivers.keep_sent([])
        assert not sent.folder.exists()
        assert await receivers.bring(sent, machine, "another engine") == copy, "it stays"
        await receivers.close()
        return [sent.folder.parent, copy.folder.parent]

    assert [store for store in asyncio.run(main()) if store.exists()] == []
