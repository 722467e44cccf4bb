"""Self-play: the policy plays all seats of a game, against itself and against earlier versions of
itself.

The loop is that of `policy_gradient`; `agentrl/rollout/opponents.py` draws who plays each episode.
"""

from collections.abc import Sequence

from agentrl.assembly.players import env_host
from agentrl.config.compatibility import check_stage
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.protocols import AlgorithmOffers
from agentrl.recipes.demonstrations import DemonstrationsConfig
from agentrl.recipes.policy_gradient import train
from agentrl.recipes.starting_model import starting_model
from agentrl.rollout.agents import SINGLE_AGENT, PolicyRoute, agents_in, check_routes
from agentrl.rollout.config import OpponentsConfig
from agentrl.rollout.opponents import Matches
from agentrl.runs.run import Run
from agentrl.runs.task_sources import task_source


class SelfPlaySettings(OpponentsConfig):
    """Settings of `recipe: self_play`."""

    demonstrations: DemonstrationsConfig | None = None
    """The episodes that the model imitates first, if it cannot play at all yet."""


async def self_play(run: Run, settings: SelfPlaySettings) -> None:
    """Train `run.config.steps` steps on games against itself and against a pool of snapshots.

    Raises:
        ConfigError: the environment has no such seats, or nothing could be learned against
        opponents.
    """
    check_stage(run.config, "training")
    matches = Matches(settings, await _policy_agents(run.config))
    check_matches(matches, run.config)
    await train(
        run,
        run.config.algorithm.make(),
        await starting_model(run, settings.demonstrations),
        matches=matches,
    )


async def _policy_agents(config: RunConfig) -> Sequence[str]:
    """The agents of the environment that `env.agents` leaves to the policy."""
    routed = {
        agent: route
        for agent, route in config.env.agents.items()
        if not isinstance(route, PolicyRoute)
    }
    async with env_host(config) as envs:
        env = envs.acquire(config.env.name)
        try:
            task = task_source(config, "corpus").task(0)
            _, info = await env.reset(task.seed, task.options)
        finally:
            await envs.release(config.env.name, env)
    agents = agents_in(info)
    check_routes(routed, agents)
    return [agent for agent in agents if agent not in routed]


def check_matches(matches: Matches, config: RunConfig) -> None:
    """Check that the policy has opponents to play against, and can learn from the games.

    Raises:
        ConfigError: it has not, or cannot.
    """
    name, agents = config.env.name, matches.agents
    if len(agents) < 2:
        there = (
            "names no agents"
            if agents == list(SINGLE_AGENT)
            else f"leaves it only {', '.join(agents)}"
        )
        raise ConfigError(
            "recipe=self_play needs an environment in which the policy can play two agents or"
            f" more, and {name} {there}: take an environment of several agents such as kuhn_poker,"
            " or recipe=policy_gradient"
        )
    if unknown := sorted(set(matches.own) - set(agents)):
        raise ConfigError(
            f"recipe.seats names {', '.join(unknown)}, which the policy does not play in {name}: it"
            f" plays {', '.join(agents)}"
        )
    size, needed = config.rollout.group_size, 2 * len(matches.own)
    if (
        matches.config.num_engines
        and size < needed
        and AlgorithmOffers.of(config.algorithm.make()).compares_members
    ):
        raise ConfigError(
            f"rollout.group_size is {size}, and the algorithm {config.algorithm.name!r} compares"
            f" episodes of a group that were played in the same seat: with {len(matches.own)} seats"
            f" a group needs {needed} episodes or more. Raise rollout.group_size, name fewer"
            " recipe.seats, or take algorithm=rae, which needs no group"
        )
