"""Tasks as the model will see them, and what a reward pays for given answers, without an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.assembly.players import env_host
from agentrl.assembly.rollouts import reward_of
from agentrl.config.run_config import RunConfig
from agentrl.conversation.chats import opening
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.hosting.observations import images_taken
from agentrl.hosting.pool import EnvPool
from agentrl.protocols import ScriptedPlayer
from agentrl.rollout.agents import agents_in, next_agent, system_prompt_in
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.episode import EnvEpisodeRunner, ScriptedPolicy
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Failed, Message, Score, Task, succeeded


@dataclass(frozen=True, slots=True)
class Opening:
    """The input of a model before its first answer: messages, and schemas of tools."""

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]

    def text(self, renderer: TemplateRenderer) -> str:
        """The prompt, as the model's chat template writes it."""
        return renderer.decode(renderer.whole(self.messages, self.tools))

    def tokens(self, renderer: TemplateRenderer) -> int:
        """The number of tokens of the prompt."""
        return len(renderer.conversation(self.tools).prompt(self.messages).ids)


async def openings(config: RunConfig, tasks: Sequence[Task]) -> list[Opening]:
    """The first prompt of the model in each of these tasks. Of several agents, that of the one that
    acts first.

    Raises:
        RolloutError: an environment fails.
    """
    async with env_host(config, shown=False) as envs:
        return [await _opening(envs, task) for task in tasks]


async def _opening(envs: EnvPool, task: Task) -> Opening:
    env = envs.acquire(task.env)
    try:
        observation, info = await env.reset(task.seed, task.options)
        system = system_prompt_in(info, next_agent(info, agents_in(info)), env.system_prompt)
        first = [Message("system", system)] if system else []
        images, info = images_taken("reset", info)
        shown = opening(info, observation, images, tools=bool(env.tools))
        return Opening((*first, *shown), env.tools)
    finally:
        await envs.release(task.env, env)


async def paid(
    config: RunConfig, answers: Sequence[tuple[Task, str]]
) -> list[tuple[Score, bool | None]]:
    """The score of each of these answers, as the first message, and whether it is a success."""
    renderer = TemplateRenderer(ByteTokenizer())
    found = []
    async with env_host(config, shown=False) as envs, reward_of(config) as reward:
        for number, (task, answer) in enumerate(answers):
            policy = ScriptedPolicy(_saying(answer), renderer)
            runner = EnvEpisodeRunner(
                policy, renderer, envs, Budget(turns=1), config.rollout.deadlines.episode
            )
            trajectory, *_ = await runner.play(Assignment(f"answer/{number}", task, 0))
            failed = isinstance(trajectory.status, Failed)
            score = (
                Score.failed(str(trajectory.status)) if failed else await reward.score(trajectory)
            )
            found.append((score, succeeded(trajectory, score)))
    return found


def _saying(answer: str) -> ScriptedPlayer:
    return lambda env, rng: answer
