"""`agentrl gateway`: serves a model to any client of a chat API, and records what was said.

The recordings are the folder of a run without training: `recipe: dpo` reads its pairs from there,
and `agentrl view` shows it. Conversations for which a reward came are in `trajectories/`, all
others in `unrewarded/`.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.assembly.policy import assemble_policy
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.files.durable import write_whole
from agentrl.flow import Flow, run_to_completion
from agentrl.gateway.public_sessions import PublicSessionRegistry, conversations_of
from agentrl.gateway.server import serving
from agentrl.gateway.session import AgentSession
from agentrl.observe.trajectories import write_trajectories
from agentrl.trajectory import Score, Trajectory

logger = logging.getLogger(__name__)

_ROWS_OF_A_FILE = 256
_SECONDS_OF_A_FILE = 30
_UNREWARDED = Score(float("nan"))


@dataclass(eq=False, slots=True)
class Recordings:
    """The conversations of ended episodes, in files of a folder. `waiting`: those that no file has
    yet.
    """

    folder: Path
    waiting: dict[str, list[tuple[Trajectory, Score]]] = field(default_factory=dict)
    _files: int = 0

    def add(self, session: AgentSession) -> None:
        """Keep the conversations of an episode that has ended."""
        for trajectory, score in conversations_of(session):
            kind = "unrewarded" if score is None else "trajectories"
            self.waiting.setdefault(kind, []).append((trajectory, score or _UNREWARDED))

    async def write(self, least: int = 1) -> None:
        """Write the kinds of which at least so many conversations wait."""
        for kind, rows in list(self.waiting.items()):
            if len(rows) >= least:
                del self.waiting[kind]
                await run_to_completion(
                    asyncio.to_thread(write_trajectories, self._new_file(kind), rows)
                )

    def _new_file(self, kind: str) -> Path:
        """The path of a new file: an earlier launch may have written into the same folder."""
        while True:
            file = self.folder / kind / f"step_{self._files:06d}.parquet"
            self._files += 1
            if not file.exists():
                return file


async def serve_policy(
    config: RunConfig,
    model: Path,
    folder: Path,
    *,
    token: str,
    on_start: Callable[[str], None],
    stopped: asyncio.Event,
) -> None:
    """Serve `model` until `stopped`, and record into `folder`.

    Raises:
        ConfigError: the model does not fit the engine, the address cannot be used, or `folder` is
        that of a run.
    """
    recordings = Recordings(folder)
    _begin(folder, config, model)
    async with assemble_policy(config, model) as (policy, renderer), Flow("gateway") as flow:
        registry = PublicSessionRegistry(
            config.gateway,
            policy=policy,
            renderer=renderer,
            token=token,
            seed=config.seed,
            ended=recordings.add,
            calls=flow,
        )
        async with serving(registry):
            on_start(registry.url)
            flow.start(registry.sweep(), name="sweep")
            flow.start(write_regularly(recordings), name="recordings")
            try:
                await stopped.wait()
            finally:
                registry.end_all()
                flow.cancel()
                await recordings.write()


def _begin(folder: Path, config: RunConfig, model: Path) -> None:
    """Make the folder of recordings, with the config and the model that is served, as the folder of
    a run has them.
    """
    if (folder / "ledger.sqlite").exists():
        raise ConfigError(
            f"--record: {folder} is the folder of a run: name another one, new or of earlier"
            " recordings"
        )
    folder.mkdir(parents=True, exist_ok=True)
    served = config.model.model_copy(update={"name": str(model.resolve())})
    write_whole(folder / "config.yaml", config.model_copy(update={"model": served}).to_yaml())


async def write_regularly(recordings: Recordings) -> None:
    """Write conversations as soon as there are many, or after half a minute, so that a kill loses
    few.
    """
    while True:
        for _ in range(_SECONDS_OF_A_FILE):
            await asyncio.sleep(1.0)
            await recordings.write(_ROWS_OF_A_FILE)
        await recordings.write()
