"""Demonstrations: episodes of a scripted player, and a model that imitates them before
reinforcement learning.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from pydantic import Field

from agentrl import plugins
from agentrl.algorithms.sft import Sft
from agentrl.assembly.devices import open_cluster
from agentrl.assembly.players import agent_player, env_host
from agentrl.assembly.rollouts import reward_of
from agentrl.assembly.trainers import make_trainer
from agentrl.batch import collate, to_samples
from agentrl.config.learning_rates import notes_of_warm_up
from agentrl.config.run_config import RunConfig
from agentrl.conversation.context import FULL, LastK
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.errors import ConfigError, EnvError
from agentrl.flow import Flow
from agentrl.gateway.player import PlayerEngine
from agentrl.recipes.evaluate import play_all
from agentrl.recipes.recordings import RecordingsConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner, ScriptedPolicy
from agentrl.rollout.next_task import next_task
from agentrl.runs.run import Run
from agentrl.runs.task_sources import task_source
from agentrl.settings.base import COLDEST, NameText, Settings
from agentrl.settings.sampling import SamplingParams
from agentrl.trajectory import UNSCORED, Task, Trajectory, succeeded, unshared

logger = logging.getLogger(__name__)

_Player = Callable[[Any, Random], str | Awaitable[str]]
"""A `ScriptedPlayer`, or the player of a program, which gets a text for an environment."""


class DemonstrationsConfig(Settings):
    """Episodes of a scripted player that the model imitates before reinforcement learning."""

    player: NameText
    """`package.module:function`, called with (environment, random.Random), returning the next
    action. For a program (`env: agent:...`) it is called with the text of the prompt instead of an
    environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the player, such as `{skill: 0.7}` of the weak players of the built-in
    environments.
    """
    summaries: NameText | None = None
    """`package.module:function`, called as the player is, answers requests for summaries: the
    demonstrations are then played with `rollout.context`, which has to be `summary`. Without it,
    and with `scratchpad`, they show whole conversations."""
    episodes: int = Field(512, gt=0)
    """Episodes to play, each with a different seed."""
    episodes_per_step: int = Field(32, gt=0)
    """Episodes in one supervised batch, which `trainer.minibatches` divides into as many updates:
    with 4 episodes and 4 minibatches each update sees one, and copying, for example, may never be
    learned."""
    epochs: int = Field(1, gt=0)
    """Passes over the episodes."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the supervised steps; all other settings are the trainer's."""
    temperature: float = Field(1.0, ge=COLDEST)
    """The temperature that divides logits while the model imitates, whatever
    `rollout.sampling.temperature` is; the loss that is reported is at this temperature too."""
    successes_only: bool = False
    """Imitate only the episodes that succeeded."""


async def imitate(run: Run, demonstrations: DemonstrationsConfig, base: Path, into: Path) -> None:
    """Play the demonstrations, train on them from `base`, and save the model."""
    config = run.config
    played = await demonstrate(config, demonstrations, base)
    verdicts = await judged(config, played)
    known = [
        trajectory
        for trajectory, verdict in zip(played, verdicts, strict=True)
        if verdict is not None
    ]
    right = [trajectory for trajectory, verdict in zip(played, verdicts, strict=True) if verdict]
    trajectories = right if demonstrations.successes_only else played
    unknown = (
        f" ({_count_episodes(played) - _count_episodes(known)} unknown)"
        if len(known) < len(played)
        else ""
    )
    run.display.say(
        f"{_count_episodes(right)} of {_count_episodes(played)} episodes of"
        f" {demonstrations.player} were successful{unknown}; imitating"
        f" {'these' if demonstrations.successes_only else 'all'}"
    )
    if known:
        run.recorder.write(
            0, {"demonstrations/success": _count_episodes(right) / _count_episodes(known)}
        )
    if not trajectories:
        raise ConfigError(
            f"no episode of {demonstrations.player} was successful{unknown}, so"
            " recipe.demonstrations.successes_only leaves nothing to imitate: choose another"
            " player, or imitate all"
        )
    loss = await learn(run, trajectories, base, into, demonstrations)
    run.recorder.write(0, {"demonstrations/loss": loss})


async def judged(config: RunConfig, played: Sequence[Trajectory]) -> list[bool | None]:
    """The success of each episode. The run's reward is asked where the environment gives no
    verdict.
    """
    scores = [UNSCORED] * len(played)
    asked = [number for number, trajectory in enumerate(played) if trajectory.success is None]
    if asked:
        async with reward_of(config) as reward, Flow("scoring") as flow:
            scoring = {n: flow.start(reward.score(played[n]), name=played[n].id) for n in asked}
        scores = [
            scoring[number].result() if number in scoring else score
            for number, score in enumerate(scores)
        ]
    return [succeeded(*pair) for pair in zip(played, scores, strict=True)]


async def learn(
    run: Run,
    trajectories: Sequence[Trajectory],
    base: Path,
    into: Path,
    how: DemonstrationsConfig | RecordingsConfig,
) -> float:
    """Train the model `base` to say what was said in these trajectories, and save it.

    Returns the loss at the end, a mean over an eighth of the steps.
    """
    size = how.episodes_per_step
    batches = [trajectories[i : i + size] for i in range(0, len(trajectories), size)] * how.epochs
    algorithm = Sft()
    losses: list[float] = []
    settings = run.config.trainer.settings.model_copy(update={"lr": how.lr})
    for text in notes_of_warm_up("trainer.warmup_steps", settings, len(batches), "the imitation"):
        run.recorder.note(0, text)
    async with (
        open_cluster(run.config, run.folder / "logs") as placed,
        make_trainer(
            placed,
            base,
            steps=len(batches),
            temperature=how.temperature,
            lr=how.lr,
            old_logprobs="engine",
        ) as trainer,
    ):
        for number, played in enumerate(batches, 1):
            batch = collate(
                sample for trajectory in played for sample in to_samples(trajectory, 1.0)
            )
            metrics = await trainer.step(batch, algorithm.loss, algorithm.normalizer(batch))
            losses.append(metrics["loss"])
            if number % max(1, len(batches) // 4) == 0:
                lately = losses[-max(1, len(batches) // 8) :]
                run.display.say(
                    f"imitation: {number} of {len(batches)} steps, loss {fmean(lately):.3f} nats a"
                    " token"
                )
        await trainer.save(into)
    return fmean(losses[-max(1, len(batches) // 8) :])


async def demonstrate(
    config: RunConfig, demonstrations: DemonstrationsConfig, model: Path
) -> list[Trajectory]:
    """Episodes of the scripted player, as the tokens that `model` would read and write. Failed ones
    are left out.

    Raises:
        EnvError: more than `rollout.max_failed_tasks` episodes failed, or all.
        ConfigError: there is no such player, it does not take its options, or nothing asks for
            summaries.
    """
    player = _player(demonstrations)
    renderer = await asyncio.to_thread(renderer_of, model, config.model)
    source = task_source(config, "demonstrations")
    tasks = [next_task(source, index) for index in range(demonstrations.episodes)]
    summaries = _summaries(config, demonstrations)
    trajectories = await _play_demonstrations(config, player, summaries, renderer, tasks)
    whole = [trajectory for trajectory in trajectories if trajectory.trainable]
    failed = [trajectory for trajectory in trajectories if not trajectory.trainable]
    if failed:
        text = (
            f"{_count_episodes(failed)} of {len(tasks)} demonstrations failed, the first with"
            f" {failed[0].status}"
        )
        if not whole or _count_episodes(failed) > config.rollout.max_failed_tasks:
            raise EnvError(f"{text} (rollout.max_failed_tasks={config.rollout.max_failed_tasks})")
        logger.warning("%s; they are left out", text)
    return whole


def _player(demonstrations: DemonstrationsConfig) -> _Player:
    """The player with its options."""
    player: _Player = plugins.load("players", demonstrations.player)
    if not demonstrations.options:
        return player
    try:
        inspect.signature(player).bind(None, None, **demonstrations.options)
    except TypeError as error:
        taken = ", ".join(list(inspect.signature(player).parameters)[2:]) or "none"
        raise ConfigError(
            f"recipe.demonstrations.options do not fit {demonstrations.player}: {error}. Its"
            f" options: {taken}"
        ) from error
    return _PlayerWithOptions(player, demonstrations.options)


def _summaries(config: RunConfig, demonstrations: DemonstrationsConfig) -> _Player | None:
    """The function that summarises, if there is one."""
    if demonstrations.summaries is None:
        return None
    context = "program's own" if config.env.is_agent else config.rollout.context.name
    if context != "summary":
        raise ConfigError(
            "recipe.demonstrations.summaries answers requests for summaries, and nothing requests"
            f" any with the {context} context: leave it out, or write"
            " rollout.context={name: summary, max_prompt_tokens: ...}"
        )
    found: _Player = plugins.load("players", demonstrations.summaries)
    return found


@dataclass(frozen=True, slots=True)
class _PlayerWithOptions:
    """A scripted player with its options, of which each call gets a copy."""

    player: _Player
    options: Mapping[str, Any]

    def __call__(self, env: Any, rng: Random) -> str | Awaitable[str]:
        return self.player(env, rng, **unshared(self.options, "recipe.demonstrations.options"))


async def _play_demonstrations(
    config: RunConfig,
    player: _Player,
    summaries: _Player | None,
    renderer: TemplateRenderer,
    tasks: Sequence[Task],
) -> list[Trajectory]:
    if config.env.is_agent:
        async with agent_player(config, renderer) as agents:
            sampling = SamplingParams(stop_token_ids=renderer.stop_token_ids)
            policy = EnginePolicy(PlayerEngine(player, renderer), sampling, 3600.0, trained=False)
            return await play_all(agents(policy), tasks, config)
    scripted = ScriptedPolicy(player, renderer)
    async with env_host(config, shown=False) as envs:
        context, requests = config.rollout.context, None
        if summaries is not None:
            requests = ScriptedPolicy(summaries, renderer, turnstile=scripted.turnstile)
        elif not isinstance(context, LastK):
            # Other contexts request texts, such as summaries, that the player does not write.
            context = FULL
        runner = EnvEpisodeRunner(
            scripted,
            renderer,
            envs,
            config.rollout.budget,
            config.rollout.deadlines.episode,
            context,
            own_budgets=config.own_budgets(),
            requests=requests,
        )
        return await play_all(runner, tasks, config, scripted.turnstile)


def _count_episodes(trajectories: Iterable[Trajectory]) -> int:
    """The number of episodes; with several agents, an episode has a trajectory for each."""
    return len({trajectory.id for trajectory in trajectories})
