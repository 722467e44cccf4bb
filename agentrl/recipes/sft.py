"""Supervised fine-tuning on the play of a scripted player: a warm start for reinforcement learning."""

from pathlib import Path
from statistics import fmean

from agentrl import plugins
from agentrl.algorithms.sft import Sft
from agentrl.batch import collate, to_samples
from agentrl.config import DemonstrationsConfig, RunConfig
from agentrl.durable import finish_folder, new_unfinished
from agentrl.errors import ConfigError, EnvError
from agentrl.recipes.evaluate import play_all
from agentrl.recipes.placed import make_trainer, open_cluster
from agentrl.recipes.workers import base_model, env_host, tasks_of
from agentrl.rollout.episode import Player, ScriptedPolicy
from agentrl.rollout.renderer import TemplateRenderer
from agentrl.run import Run
from agentrl.trajectory import Trajectory


async def sft(run: Run) -> None:
    """The recipe: only the demonstrations, no reinforcement learning."""
    if run.config.demonstrations is None:
        raise ConfigError("recipe sft needs a `demonstrations` section that names a player")
    folder = await starting_model(run)
    run.display.say(f"the model is in {folder}")


async def starting_model(run: Run) -> Path:
    """The folder of the model that reinforcement learning starts from: the configured one, after its demonstrations."""
    base = await base_model(run)
    if run.config.demonstrations is None:
        return base
    final = run.folder / "demonstrations"
    if not final.exists():
        await imitate(run, run.config.demonstrations, base, new_unfinished(final))
        finish_folder(final)
    return final


async def imitate(run: Run, demonstrations: DemonstrationsConfig, base: Path, into: Path) -> None:
    """Play the demonstrations, train on them from `base`, and save the model."""
    config = run.config
    trajectories = await demonstrate(config, demonstrations, base)
    run.display.say(
        f"{sum(trajectory.success for trajectory in trajectories)} of {len(trajectories)} episodes of "
        f"{demonstrations.player} were successful; imitating all"
    )
    size = demonstrations.episodes_per_step
    batches = [trajectories[i : i + size] for i in range(0, len(trajectories), size)] * demonstrations.epochs
    algorithm = Sft()
    losses: list[float] = []
    async with (
        open_cluster(config) as placed,
        make_trainer(placed, base, steps=len(batches), lr=demonstrations.lr) as trainer,
    ):
        for number, played in enumerate(batches, 1):
            samples = [sample for trajectory in played for sample in to_samples(trajectory, 1.0)]
            batch = collate(samples, row_tokens=trainer.row_tokens)
            metrics = await trainer.step(batch, algorithm.loss, algorithm.normalizer(batch))
            losses.append(metrics["loss"])
            if number % max(1, len(batches) // 4) == 0:
                lately = losses[-max(1, len(batches) // 8) :]
                run.display.say(f"imitation step {number} of {len(batches)}: loss {fmean(lately):.3f} nats a token")
        await trainer.save(into)


async def demonstrate(config: RunConfig, demonstrations: DemonstrationsConfig, model: Path) -> list[Trajectory]:
    """Episodes of the scripted player, as the tokens that `model` would read and write.

    Raises:
        EnvError: an episode failed.
    """
    renderer = TemplateRenderer.of_model(model)
    policy = ScriptedPolicy(plugins.load("players", demonstrations.player), renderer)
    source = tasks_of(config, "demonstrations")
    async with env_host(config) as envs:
        player = Player(policy, renderer, envs, config.rollout.max_turns, config.rollout.deadlines.episode)
        tasks = [source.task(index) for index in range(demonstrations.episodes)]
        trajectories = await play_all(player, tasks, config.seed, config.rollout.max_live_episodes)
    failed = [trajectory for trajectory in trajectories if not trajectory.trainable]
    if failed:
        raise EnvError(f"{len(failed)} of {len(tasks)} demonstrations failed, the first with {failed[0].status}")
    return trajectories
