"""Weights from the trainer to the engines, by version, in two phases.

The trainer's weights are written once, outside the processes that read them
(`agentrl/weights/bundle.py`). Each engine then stages them: it opens and checks them while it still
serves the old version. When all engines have done so, they commit the weights, one engine after the
other. A failure before the commit leaves the old version on all engines; an engine that fails to
commit is dead and serves no request. Engines serve different versions only briefly, during a
commit.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from agentrl.errors import EngineDeadError, EngineError, WeightsError
from agentrl.flow import deadline, now, run_to_completion, span
from agentrl.protocols import Engine, EngineOffers, Trainer
from agentrl.weights.bundle import BundlePlace, WeightBundle
from agentrl.weights.config import WeightsConfig
from agentrl.weights.store import WeightStore, storage_folders

if TYPE_CHECKING:
    from torch import Tensor


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Published:
    """A version that all engines serve.

    `seconds` of loop time by phase: write (from the trainer's devices into the files), stage,
    commit.
    """

    version: int
    weights: Mapping[str, "Tensor"]
    attempts: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """For the run's metrics: bytes written, attempts, seconds by phase."""
        size = self.weights.manifest.size if isinstance(self.weights, WeightBundle) else 0
        seconds = {f"weights/seconds_{phase}": seconds for phase, seconds in self.seconds.items()}
        return {"weights/bytes": float(size), "weights/attempts": float(self.attempts), **seconds}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as the phase `name`."""
        start = now()
        try:
            with span("weights", name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + now() - start


class TakesWeights(Protocol):
    """A follower of the policy's versions: an engine, or something that keeps them."""

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """See `Engine.stage_weights`."""
        ...

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Take this version."""
        ...


class WeightPublisher:
    """Updates the engine to the trainer's weights. An async context manager; leaving it removes all
    published files.

    Each of `followers` takes only the versions divisible by its number.
    """

    def __init__(
        self,
        engine: Engine,
        followers: tuple[tuple[TakesWeights, int], ...] = (),
        config: WeightsConfig | None = None,
    ) -> None:
        self._engine = engine
        self._followers = followers
        self._config = config or WeightsConfig()
        self._deadline = self._config.seconds
        self._parents = storage_folders(self._config)
        self._stores: list[WeightStore] = []
        self._served: dict[int, Mapping[str, Tensor]] = {}  # by engine, for its restarted replicas

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        while self._stores:
            self._stores.pop().close()

    async def publish(self, trainer: Trainer, version: int) -> Published:
        """Publish the trainer's weights as `version`; returns when the engine samples under it.

        Raises:
            WeightsError: they cannot be published. All engines serve the previous version.
            EngineDeadError: the update killed an engine, which serves no request. All others serve
            the same version.
            DeadlineError: an engine did not answer in time.
        """
        followers = [follower for follower, every in self._followers if version % every == 0]
        engines: list[TakesWeights] = [self._engine, *followers]
        published = await self._staged(trainer, version, engines)
        with published.phase("commit"):
            await run_to_completion(self._commit(published, engines))
        self._served |= dict.fromkeys(map(id, engines), published.weights)
        for store in self._stores:
            await store.keep_only(self._served.values())
        return published

    async def _staged(
        self, trainer: Trainer, version: int, engines: Sequence[TakesWeights]
    ) -> Published:
        """Write the weights and stage them on all engines; retry failures with new files."""
        published = Published(version, {})
        while True:
            published.attempts += 1
            try:
                if self._parents:
                    await self._stage_bundle(trainer, published, engines)
                else:
                    with published.phase("write"):
                        published.weights = await trainer.weights()
                    await self._stage(published, engines)
                return published
            except WeightsError as error:
                if published.attempts >= self._config.attempts:
                    raise WeightsError(
                        f"version {version} of the weights could not be published after"
                        f" {published.attempts} attempts (weights.attempts); every engine serves"
                        f" the previous version. The last error: {error}"
                    ) from error

    async def _stage_bundle(
        self, trainer: Trainer, published: Published, engines: Sequence[TakesWeights]
    ) -> None:
        try:
            with self._place(published.version) as place:
                with published.phase("write"):
                    published.weights = await trainer.write_weights(place.write)
                await self._stage(published, engines)
        except OSError as error:
            parent = self._parents[0]
            if len(self._parents) > 1:
                self._parents.pop(0)
                logger.warning(
                    "%s; from now on weights are published in %s", error, self._parents[0]
                )
            raise WeightsError(
                f"writing into {parent} failed: {error}. Make room there, or choose another place"
                " by weights.transport and weights.folder"
            ) from error

    async def _stage(self, published: Published, engines: Sequence[TakesWeights]) -> None:
        with published.phase("stage"):
            for number, engine in enumerate(engines):
                if not EngineOffers.of(engine).stages_weights:
                    continue
                try:
                    with deadline("engine", "update_weights", self._deadline):
                        await engine.stage_weights(published.weights, published.version)
                except EngineDeadError:
                    raise
                except (EngineError, WeightsError) as error:
                    which = f" on follower {number}" if number else ""
                    raise WeightsError(f"staging{which} failed: {error}") from error

    async def _commit(self, published: Published, engines: Sequence[TakesWeights]) -> None:
        for engine in engines:
            with deadline("engine", "update_weights", self._deadline):
                await engine.update_weights(published.weights, published.version)

    def _place(self, version: int) -> BundlePlace:
        parent = self._parents[0]
        if not self._stores or self._stores[-1].folder.parent != parent:
            self._stores.append(WeightStore.open(parent, self._config.bucket_mib << 20))
        return self._stores[-1].place(version)


def checksum(weights: Mapping[str, "Tensor"]) -> str:
    """SHA-256 over names and bytes of all weights, in order of names, in hex."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        raw = weights[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(name.encode() + b"\0" + raw.numpy().tobytes())
    return digest.hexdigest()
