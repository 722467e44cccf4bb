"""One episode: environment and policy take turns until one of them, or a limit, ends it.

This is the one place where what goes wrong in a rollout becomes data: a `RolloutError` ends the episode as
`Failed(layer, error)`. Anything else is a defect and surfaces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import Field

from agentrl.errors import EngineError, RolloutError
from agentrl.flow import deadline, now
from agentrl.protocols import Conversation, Engine, GenerateRequest, Prompt, Renderer, SamplingParams, Settings
from agentrl.rollout.env_host import EnvHost, LiveEnv
from agentrl.rollout.seeds import derive_seed
from agentrl.trajectory import Completion, Failed, Message, Status, Task, Terminated, Trajectory, Truncated, Turn


class Sampling(Settings):
    """How the policy is sampled."""

    max_tokens: int = Field(64, gt=0)
    """Longest answer of a turn, in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Logits are divided by it, in the engine and in the trainer."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to play. `seed` is of its sampling; its environment's is the task's, the same for a whole group."""

    id: str
    task: Task
    seed: int
    priority: int = 0


class Policy(Protocol):
    """Whoever answers in an episode: an engine, or a scripted player."""

    @property
    def max_context(self) -> int:
        """Tokens that prompt and answer may have together."""
        ...

    async def answer(self, episode: Episode, turn: int, prompt: Prompt, env: LiveEnv) -> Completion:
        """The answer of one turn, as tokens."""
        ...


@dataclass(frozen=True, slots=True)
class EnginePolicy:
    """The model that an engine serves."""

    engine: Engine
    sampling: SamplingParams
    deadline: float

    @property
    def max_context(self) -> int:
        """The engine's."""
        return self.engine.max_context

    async def answer(self, episode: Episode, turn: int, prompt: Prompt, env: LiveEnv) -> Completion:
        """Sample a completion within the deadline."""
        request = GenerateRequest(
            id=f"{episode.id}/{turn}",
            prompt_ids=prompt.ids,
            sampling=self.sampling,
            seed=derive_seed(episode.seed, turn),
            priority=episode.priority,
            session=episode.id,
        )
        with deadline("engine", "generate", self.deadline):
            completion = await self.engine.generate(request)
        if completion.finish_reason == "abort":
            raise EngineError(f"the engine aborted request {request.id}")
        return completion


@dataclass(slots=True)
class _Play:
    """What has happened in an episode so far; `unanswered` are the messages that the policy has not been shown."""

    conversation: Conversation
    turns: list[Turn] = field(default_factory=list)
    unanswered: Sequence[Message] = ()


class EpisodePlayer(Protocol):
    """Plays episodes, whatever they are made of."""

    async def play(self, episode: Episode) -> Trajectory:
        """Play `episode` to its end, whatever end that is. Only cancellation and defects are raised."""
        ...


@dataclass(frozen=True, slots=True)
class Player:
    """`EpisodePlayer` of a policy and environments: the parts that all episodes share."""

    policy: Policy
    renderer: Renderer
    envs: EnvHost
    max_turns: int
    deadline: float

    async def play(self, episode: Episode) -> Trajectory:
        """Play `episode` to its end, whatever end that is. Only cancellation and defects are raised."""
        play = _Play(self.renderer.conversation())
        started = now()
        try:
            env = self.envs.take(episode.task.env)
            try:
                with deadline("environment", "episode", self.deadline):
                    status = await self._take_turns(episode, play, env)
            finally:
                # One that was left in the middle of an episode, but not of a call, is sound: the next resets it.
                await self.envs.give_back(episode.task.env, env)
        except RolloutError as error:
            status = Failed(error.layer, str(error))
        messages = (*play.conversation.messages, *play.unanswered)
        return Trajectory(episode.id, episode.task, tuple(play.turns), status, messages, now() - started)

    async def _take_turns(self, episode: Episode, play: _Play, env: LiveEnv) -> Status:
        observation, info = await env.reset(episode.task.seed, episode.task.options)
        play.conversation = self.renderer.conversation(env.tools)
        opening = [Message("system", env.system_prompt)] if env.system_prompt else []
        play.unanswered = [*opening, Message("user", observation)]
        while len(play.turns) < self.max_turns:
            prompt = play.conversation.prompt(play.unanswered)
            play.unanswered = ()
            if len(prompt.ids) >= self.policy.max_context:
                return Truncated("context") if play.turns else _too_long(len(prompt.ids), self.policy.max_context)
            asked = now()
            completion = await self.policy.answer(episode, len(play.turns), prompt, env)
            answered = now()
            action = play.conversation.answer(completion)
            reward = 0.0
            try:
                observation, reward, terminated, truncated, info = await env.step(action)
            finally:  # what the model said is not lost if the environment fails
                turn = Turn(
                    prompt.new_ids, completion, float(reward), info, prompt.forked, answered - asked, now() - answered
                )
                play.turns.append(turn)
            play.unanswered = [Message("tool" if env.tools else "user", observation)]
            if terminated:
                return Terminated()
            if truncated:
                return Truncated("env")
        return Truncated("turns")


def _too_long(tokens: int, limit: int) -> Failed:
    return Failed(
        "data", f"the first prompt has {tokens} tokens and the engine's context holds {limit}: raise engine.max_context"
    )
