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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from agentrl import plugins
from agentrl.errors import EngineDeadError, EngineError, WeightsError
from agentrl.flow import Flow, deadline, now, run_to_completion, span
from agentrl.protocols import Engine, EngineOffers, Trainer
from agentrl.weights.config import WeightsConfig
from agentrl.weights.machines import readable_here
from agentrl.weights.shipment import DirectShipment, Shipment
from agentrl.weights.transport import Transport

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
    weights: Shipment
    attempts: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """For the run's metrics: bytes written, attempts, seconds by phase."""
        seconds = {f"weights/seconds_{phase}": seconds for phase, seconds in self.seconds.items()}
        return {
            "weights/bytes": float(self.weights.size),
            "weights/attempts": float(self.attempts),
            **seconds,
        }

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as the phase `name`."""
        start = now()
        try:
            with span("weights", name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + now() - start


VersionListener = Callable[[Mapping[str, "Tensor"], int], Awaitable[None]]
"""Gets the weights of each version by Hugging Face names, and its number, after the engines."""


class WeightPublisher:
    """Updates the engine to the trainer's weights. An async context manager; leaving it waits for
    files that are being written, and removes all.

    Each of `followers`, which are engines too, takes only the versions divisible by its number.
    `listener` is called with each version after them. `transport`: by default that of the config.
    """

    def __init__(
        self,
        engine: Engine,
        followers: tuple[tuple[Engine, int], ...] = (),
        config: WeightsConfig | None = None,
        listener: VersionListener | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._engine = engine
        self._followers = followers
        self._listener = listener
        self._config = config or WeightsConfig()
        self._deadline = self._config.seconds
        self._transport: Transport = transport or plugins.load(
            "weight_transports", self._config.transport
        )(self._config)
        # By engine. An engine that is restarted receives its version again.
        self._served: dict[int, Shipment] = {}
        self._flow = Flow("weights beside steps")

    async def __aenter__(self) -> Self:
        await self._flow.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._flow.__aexit__(*exc)
        finally:
            self._transport.close()

    async def publish(self, trainer: Trainer, version: int) -> Published:
        """Publish the trainer's weights as `version`; returns when the engine samples under it.

        Raises:
            WeightsError: they cannot be published. All engines serve the previous version.
            EngineDeadError: the update killed an engine, which serves no request. All others serve
            the same version.
            DeadlineError: an engine did not answer in time.
        """
        followers = [follower for follower, every in self._followers if version % every == 0]
        engines: list[Engine] = [self._engine, *followers]
        published = Published(version, DirectShipment({}))
        while True:
            published.attempts += 1
            try:
                await self._send_and_stage(trainer, published, engines)
                try:
                    with published.phase("commit"):
                        await run_to_completion(self._commit(trainer, published, engines))
                except WeightsError:
                    # With the version on some engines, the others have to get this very shipment.
                    if not any(engine.policy_version == version for engine in engines):
                        await run_to_completion(self._transport.withdraw(published.weights))
                    raise
                break
            except WeightsError as error:
                if any(engine.policy_version == version for engine in engines):
                    raise
                if published.attempts >= self._config.attempts:
                    raise WeightsError(
                        f"version {version} of the weights could not be published after"
                        f" {published.attempts} attempts (weights.attempts); every engine serves"
                        f" the previous version. The last error: {error}"
                    ) from error
        await self._transport.keep_only(self._served.values())
        return published

    async def _send_and_stage(
        self, trainer: Trainer, published: Published, engines: Sequence[Engine]
    ) -> None:
        """Send the weights, or announce them, and stage them on all engines."""
        with published.phase("write"):
            published.weights = await self._transport.send(trainer, published.version)
        try:
            await self._stage_on_all(published, engines)
        except BaseException:
            await run_to_completion(self._transport.withdraw(published.weights))
            raise

    async def _stage_on_all(self, published: Published, engines: Sequence[Engine]) -> None:
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

    async def _commit(
        self, trainer: Trainer, published: Published, engines: Sequence[Engine]
    ) -> None:
        async def update(engine: Engine) -> None:
            with deadline("engine", "update_weights", self._deadline):
                await engine.update_weights(published.weights, published.version)

        if published.weights.is_live:
            # Whoever reads a live shipment waits for the others.
            delivery = self._transport.deliver(trainer, published.weights)
            await _run_all([delivery, *map(update, engines)])
        else:
            for engine in engines:
                await update(engine)
        self._served |= dict.fromkeys(map(id, engines), published.weights)
        if published.weights.is_live:
            # Its files are written beside the next step.
            files = self._complete_files(published.weights)
            self._flow.start(files, name=f"files of version {published.version}")
        if self._listener is not None:
            with deadline("engine", "update_weights", self._deadline):
                at_rest = await published.weights.at_rest()
                async with readable_here(at_rest) as here:
                    await self._listener(here, published.version)

    async def _complete_files(self, shipment: Shipment) -> None:
        """See that the files of a live shipment become complete."""
        try:
            await shipment.at_rest()
        except WeightsError as error:
            # Those of a version that another has replaced meanwhile are not wanted.
            if shipment in self._served.values():
                logger.warning(
                    "%s; the engines that run have these weights, but one that starts before the"
                    " next version would not",
                    error,
                )


async def _run_all(works: Sequence[Awaitable[None]]) -> None:
    """Run all at the same time and to their end, and then raise the first error: no work is
    cancelled because another one failed.
    """

    async def error_of(work: Awaitable[None]) -> Exception | None:
        try:
            await work
        except Exception as error:
            return error
        return None

    async with Flow("weights") as flow:
        ends = [flow.start(error_of(work), name=str(i)) for i, work in enumerate(works)]
    for end in ends:
        if (error := end.result()) is not None:
            raise error


def checksum(weights: Mapping[str, "Tensor"]) -> str:
    """SHA-256 over names and bytes of all weights, in order of names, in hex."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        raw = weights[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(name.encode() + b"\0" + raw.numpy().tobytes())
    return digest.hexdigest()
