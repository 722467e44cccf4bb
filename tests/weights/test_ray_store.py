"""Weights for engines on machines that do not see where the trainer's lie."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch

from agentrl.cluster.ray_engine import RayEngine
from agentrl.cluster.ray_placement import Unplaced
from agentrl.engines.local import LocalEngine
from agentrl.engines.router import Router
from agentrl.errors import WeightsError
from agentrl.plugins import Component
from agentrl.protocols import GenerateRequest
from agentrl.sandbox import kernel
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.trainers import LOSS, random_batches
from agentrl.trainers.local import LocalTrainer
from agentrl.weights.bundle import BundlePlace, WeightBundle
from agentrl.weights.config import WeightsConfig
from agentrl.weights.publisher import WeightPublisher
from agentrl.weights.store import SHARED_MEMORY
from agentrl.weights.transports import ray_store
from agentrl.weights.transports.ray_store import RayReceiver
from tests.cluster.shared_ray import join_shared_ray


def written(folder: Path, version: int = 1) -> WeightBundle:
    weights = {f"w{i}": torch.arange(100.0) + version + i for i in range(5)}
    return BundlePlace(folder / f"v{version}", version, bucket_bytes=800).write(weights)


def test_a_bundle_that_was_brought_is_the_same_and_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    bundles = [written(tmp_path / "there", version) for version in (1, 2)]
    arrivals = RayReceiver(tmp_path / "here")

    async def bring(bundle: WeightBundle) -> WeightBundle:
        for bucket in bundle.manifest.buckets:
            await arrivals.take(
                bundle.manifest, bucket.file, np.fromfile(bundle.folder / bucket.file, np.uint8)
            )
        await arrivals.finish(bundle.manifest)
        here = arrivals.local(bundle)
        assert isinstance(here, WeightBundle)
        return here

    async def main() -> None:
        first = await bring(bundles[0])
        assert first.folder != bundles[0].folder
        first.verify()
        assert all(torch.equal(first[name], bundles[0][name]) for name in bundles[0])
        second = await bring(bundles[1])
        assert arrivals.local(bundles[0]) == first, "until the new one is taken up"
        await arrivals.keep_only(second)
        assert arrivals.local(bundles[0]) is bundles[0]
        assert [path.name for path in second.folder.parent.iterdir()] == [second.folder.name]
        await arrivals.keep_only(None)
        assert list(second.folder.parent.iterdir()) == []
        arrivals.close()

    assert not arrivals.missing(bundles[0]), "it is seen from here"
    asyncio.run(main())
    assert list((tmp_path / "here").iterdir()) == []


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


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a folder from a process")
def test_engines_that_do_not_see_the_files_get_them_through_the_object_store(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    join_shared_ray()
    published, stores = tmp_path / "published", tmp_path / "stores"
    published.mkdir()
    stores.mkdir()
    config = FarEngine.Config(max_batch=2, max_context=64, device="cpu", hidden=published)
    request = GenerateRequest("r", (7, 8, 9), SamplingParams(max_tokens=8, temperature=0.0))

    async def main() -> None:
        far = [
            RayEngine(
                Component("far", FarEngine, config),
                shallow_model_dir,
                Unplaced().options("engine", number),
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
                assert set(ray_store._put[new]) == {
                    bucket.file for bucket in new.manifest.buckets
                }, "put once"
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

    asyncio.run(main())
    made = [SHARED_MEMORY / store.name for store in stores.iterdir()]
    assert len(made) == 2, "one for each far engine"
    assert [store for store in made if store.exists()] == []
