"""Continues a saved episode from one of its turns: its earlier answers are replayed, and then a
model or a person answers.

This needs no snapshot, only an environment that replies the same to the same answers. What it shows
is compared with the recording, message by message.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.assembly.players import engine_policy, env_host
from agentrl.assembly.policy import assemble_rollouts
from agentrl.assembly.rollouts import reward_of
from agentrl.config.run_config import RunConfig
from agentrl.conversation.renderer import TemplateRenderer, renderer_of
from agentrl.errors import ConfigError
from agentrl.hosting.beginnings import CHANGED
from agentrl.hosting.live_env import LiveEnv
from agentrl.protocols import Conversation, Prompt, Renderer
from agentrl.recipes.recordings import same_tokens
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.episode import EnvEpisodeRunner, Policy
from agentrl.rollout.member import Member, MemberResult
from agentrl.rollout.runner import Episode
from agentrl.rollout.seeds import derive_seed
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion, Failed, Message, Trajectory

_PATIENCE = 7 * 86400.0
"""Seconds that a person may take over an episode."""


@dataclass(frozen=True, slots=True)
class Departure:
    """The turn of a saved episode from which it goes on in another way.

    Raises:
        ConfigError: the episode has no such turn, or cannot be gone on with.
    """

    recorded: Trajectory
    turn: int
    """Its number, from 0. Of the turns before it, the recorded answers are given again."""

    def __post_init__(self) -> None:
        name, turns = self.recorded.id, len(self.recorded.turns)
        if self.recorded.agent:
            raise ConfigError(
                f"{name} has several agents, and the answers of each are needed to go back to a"
                " turn: only an episode of a single agent can be gone on with"
            )
        if not 0 <= self.turn < turns:
            there = f"turns 0 to {turns - 1}" if turns else "no turn"
            raise ConfigError(f"{name} has no turn {self.turn}: it has {there}")

    @property
    def before(self) -> Sequence[Message]:
        """The recorded messages before the answer of the turn."""
        messages = self.recorded.messages
        answers = (at for at, message in enumerate(messages) if message.is_answer)
        return messages[: next(islice(answers, self.turn, None), len(messages))]

    def answers(self, renderer: TemplateRenderer) -> list[Completion]:
        """The recorded answers of the turns before it: as they were sampled, or with the tokens of
        another model's renderer.
        """
        if same_tokens([self.recorded], renderer):
            return [turn.completion for turn in self.recorded.turns[: self.turn]]
        said = [message.content for message in self.before if message.is_answer]
        return [_completion_of_text(renderer, text) for text in said]


Show = Callable[[Message, bool], None]
"""Takes each message of the conversation, and whether it is one of those that were recorded."""


async def continue_by_model(
    config: RunConfig, model: Path, departure: Departure, show: Show, *, seed: int = 0
) -> MemberResult:
    """Go on with the answers of a model, sampled as in training.

    Raises:
        ConfigError: the environment does not come to the recorded turn again.
    """
    _check_env(config, departure)
    async with assemble_rollouts(config, model) as rollouts:
        runner = rollouts.runner
        if not isinstance(runner, EnvEpisodeRunner) or not isinstance(
            runner.renderer, TemplateRenderer
        ):
            raise TypeError("environments without rollout workers are played by this process")
        sampling = config.rollout.sampling
        then = engine_policy(
            config, rollouts.engine, model, runner.renderer, sampling, trained=False
        )
        policy = _ReplayingPolicy(departure.answers(runner.renderer), then)
        watching = _WatchingRenderer(runner.renderer, departure, show)
        member = Member(replace(runner, policy=policy, renderer=watching), rollouts.reward)
        return await _play(member, policy, departure, config.seed, seed)


async def continue_by_hand(
    config: RunConfig, model: Path, departure: Departure, show: Show, ask: Callable[[], str]
) -> MemberResult:
    """Go on with the answers of a person. `model`: the folder of the run's model, of which only the
    tokenizer is needed; `ask` waits for the next answer.

    Raises:
        ConfigError: the environment does not come to the recorded turn again.
        EOFError: `ask` has raised it, as the person has left.
    """
    _check_env(config, departure)
    renderer = await asyncio.to_thread(renderer_of, model, config.model)
    rollout = config.rollout
    policy = _ReplayingPolicy(departure.answers(renderer), _PersonPolicy(renderer, ask))
    async with env_host(config, shown=False) as envs, reward_of(config) as reward:
        runner = EnvEpisodeRunner(
            policy,
            _WatchingRenderer(renderer, departure, show),
            envs,
            _without_time_limit(rollout.budget),
            _PATIENCE,
            rollout.context,
            own_budgets={
                env: _without_time_limit(own) for env, own in config.own_budgets().items()
            },
        )
        return await _play(Member(runner, reward), policy, departure, config.seed)


async def _play(
    member: Member, policy: "_ReplayingPolicy", departure: Departure, *seeds: int
) -> MemberResult:
    recorded = departure.recorded
    seed = derive_seed(*seeds, "replay", recorded.id)
    played = await member.play(Assignment(f"{recorded.id}/replay", recorded.task, seed))
    if not policy.departed:
        trajectory = played.trajectories[0]
        status, turns = trajectory.status, len(trajectory.turns)
        why = f" ({status.error})" if isinstance(status, Failed) else ""
        raise ConfigError(
            f"{recorded.id} cannot be brought to turn {departure.turn}: the episode is"
            f" {status.name} after {turns} of its answers were given again{why}. {CHANGED}"
        )
    return played


def _check_env(config: RunConfig, departure: Departure) -> None:
    env = departure.recorded.task.env
    if config.env.is_agent:
        raise ConfigError(
            f"{departure.recorded.id} was played by a program ({config.env.name}), which cannot be"
            " brought to a turn: only episodes of an environment can be gone on with"
        )
    if env not in config.envs:
        raise ConfigError(
            f"{departure.recorded.id} was played in {env!r}, which the config of the run does not"
            f" have; it has {', '.join(config.envs)}"
        )


def _without_time_limit(budget: Budget) -> Budget:
    return budget.model_copy(update={"seconds": None})


def _completion_of_text(renderer: TemplateRenderer, text: str) -> Completion:
    """An answer with the tokens that a model would have sampled to write it, each certain."""
    token_ids = renderer.answer_ids(text)
    zeros = [0] * len(token_ids)
    return Completion(token_ids, floats(zeros), ints(zeros), "stop")


@dataclass(slots=True)
class _ReplayingPolicy:
    """`Policy` that gives recorded answers, and then those of another one."""

    answers: Sequence[Completion]
    then: Policy
    departed: bool = False
    """The other one has been asked."""

    @property
    def max_context(self) -> int:
        return self.then.max_context

    async def answer(self, episode: Episode, turn: int, prompt: Prompt, env: LiveEnv) -> Completion:
        if turn < len(self.answers):
            completion = self.answers[turn]
            sampled = len(completion.token_ids)
            episode.usage.add_answer(sampled, len(prompt.ids) + sampled, episode.id)
            return completion
        self.departed = True
        return await self.then.answer(episode, turn, prompt, env)


@dataclass(frozen=True, slots=True)
class _PersonPolicy:
    """`Policy` of somebody who writes answers."""

    renderer: TemplateRenderer
    ask: Callable[[], str]
    max_context: int = 1 << 30

    async def answer(self, episode: Episode, turn: int, prompt: Prompt, env: LiveEnv) -> Completion:
        return _completion_of_text(self.renderer, self.ask())


@dataclass(frozen=True, slots=True)
class _WatchingRenderer:
    """`Renderer` whose conversations are shown, and compared with the recorded one."""

    renderer: Renderer
    departure: Departure
    show: Show

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.renderer.stop_token_ids

    def conversation(self, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        conversation = self.renderer.conversation(tools)
        return _WatchedConversation(conversation, self.departure, self.show)


@dataclass(slots=True)
class _WatchedConversation:
    """A conversation of `_WatchingRenderer`."""

    inner: Conversation
    departure: Departure
    show_message: Show
    seen: int = 0
    """Messages that were shown."""
    expected: Sequence[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = self.departure.before

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.inner.messages

    @property
    def shown(self) -> Sequence[Message]:
        return self.inner.shown

    def show(self, messages: Sequence[Message]) -> None:
        self.inner.show(messages)

    def size(self, messages: Sequence[Message]) -> int:
        return self.inner.size(messages)

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        prompt = self.inner.prompt(messages)
        self._show_new()
        return prompt

    def answer(self, completion: Completion) -> str:
        text = self.inner.answer(completion)
        self._show_new()
        return text

    def _show_new(self) -> None:
        for message in self.inner.messages[self.seen :]:
            again = self.seen < len(self.expected)
            if again:
                self._check(message, self.expected[self.seen])
            self.show_message(message, again)
            self.seen += 1

    def _check(self, now: Message, then: Message) -> None:
        if (now.role, now.content, now.images) == (then.role, then.content, then.images):
            return
        name, turn = self.departure.recorded.id, self.departure.turn
        if then.is_answer:
            raise ConfigError(
                f"{name} cannot be brought to turn {turn}: a recorded answer is read in another way"
                f" now, as {now.described!r:.300} and not as {then.described!r:.300}. With another"
                " model, its template or its tool_format may be why"
            )
        raise ConfigError(
            f"{name} cannot be brought to turn {turn}: after"
            f" {sum(message.is_answer for message in self.expected[: self.seen])} of its answers"
            f" were given again, message {self.seen} is {now.role} {now.described!r:.300}, and"
            f" {then.role} {then.described!r:.300} was recorded. {CHANGED}"
        )
