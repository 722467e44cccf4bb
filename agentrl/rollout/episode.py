"""One episode: environment and agents take turns until one of them, or a limit, ends it.

Only here do failures of a rollout become data: a `RolloutError` ends the episode as `Failed(layer,
error)`. Any other exception is a defect and propagates.
"""

import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np

from agentrl.conversation.chats import opening
from agentrl.conversation.context import FULL, ContextPolicy
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError, EnvError, RolloutError
from agentrl.flow import Turnstile, deadline, elapsed
from agentrl.hosting.beginnings import Beginning
from agentrl.hosting.calls import calls_taken
from agentrl.hosting.live_env import LiveEnv
from agentrl.hosting.observations import images_taken
from agentrl.hosting.pictures import taken
from agentrl.hosting.pool import EnvPool
from agentrl.protocols import (
    Conversation,
    Prompt,
    Renderer,
    ScriptedPlayer,
)
from agentrl.rollout.agents import (
    SINGLE_AGENT,
    agents_in,
    check_routes,
    earnings,
    next_agent,
    success_of,
    system_prompt_in,
)
from agentrl.rollout.assignment import (
    Assignment,
    Report,
    StateSaved,
    TurnsPlayed,
    ignore_reports,
)
from agentrl.rollout.branches import BranchPlan, BranchStart
from agentrl.rollout.budget import Budget
from agentrl.rollout.runner import Episode
from agentrl.rollout.seeds import derive_seed
from agentrl.tokens.arrays import IntArray, floats, ints
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import PlacedImage
from agentrl.trajectory import (
    SEGMENT,
    Completion,
    Failed,
    Message,
    Status,
    Terminated,
    Trajectory,
    Truncated,
    Turn,
)


class Policy(Protocol):
    """Produces the answers in an episode: an engine, or a scripted player."""

    @property
    def max_context(self) -> int:
        """Most tokens that prompt and answer may have together."""
        ...

    async def answer(self, episode: Episode, turn: int, prompt: Prompt, env: LiveEnv) -> Completion:
        """The answer of one turn, as tokens."""
        ...


@dataclass(frozen=True, slots=True)
class ScriptedPolicy:
    """`Policy` of a scripted player: its text as the tokens that a model would have sampled to
    write it.

    If neither the player nor the environment waits for anything, the turnstile keeps the event loop
    responsive.
    """

    player: ScriptedPlayer
    renderer: TemplateRenderer
    max_context: int = 1 << 30
    turnstile: Turnstile = field(default_factory=lambda: Turnstile(16))

    async def answer(self, episode: Episode, turn: int, prompt: Prompt, env: LiveEnv) -> Completion:
        """The player's text as tokens, each with logprob 0 (certainty)."""
        await self.turnstile.passes()
        rng = random.Random(derive_seed(episode.seed, turn))
        words = await env.consult(self.player, rng)
        token_ids = self.renderer.answer_ids(words)
        return Completion(
            token_ids, floats(np.zeros(len(token_ids))), ints(np.zeros(len(token_ids))), "stop"
        )


@dataclass(frozen=True, slots=True)
class Role:
    """The player of an agent: its policy, its renderer, the context that it sees, and whether it is
    trained. `requests`: who answers what the context asks for (a summary) instead of the policy.
    """

    policy: Policy
    renderer: Renderer
    context: ContextPolicy = FULL
    trained: bool = True
    requests: Policy | None = None


class _Reply(NamedTuple):
    """The new part of an agent's prompt, its answer in tokens and as an action, and the times of
    both.
    """

    prompt: Prompt
    completion: Completion
    action: str
    asked: float
    answered: float

    def turn(
        self, reward: float, info: dict[str, Any], ended: float, state: str, picture: str = ""
    ) -> Turn:
        calls, info = calls_taken(info)
        return Turn(
            self.prompt.new_ids,
            self.completion,
            reward,
            info,
            forked=self.prompt.forked,
            generate_seconds=self.answered - self.asked,
            env_seconds=ended - self.answered,
            state=state,
            asked=self.asked,
            picture=picture,
            calls=None if calls is None else tuple(calls),
            images=self.prompt.new_images,
        )


@dataclass(slots=True)
class _AgentState:
    """An agent in an episode, with its own view of it.

    `unanswered` are the messages that it has not seen yet. `asked` is the prompt of its turn in
    progress, if any.
    """

    agent: str
    role: Role
    episode: Episode
    conversation: Conversation
    unanswered: Sequence[Message]
    turns: list[Turn] = field(default_factory=list)
    head_start: float = 0.0
    tail_ids: IntArray = field(default_factory=lambda: ints(()))
    tail_images: tuple[PlacedImage, ...] = ()
    asked: Prompt | None = None

    def earn(self, reward: float) -> None:
        """Add `reward` to the last turn, or before the first turn to the head start."""
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)
        else:
            self.head_start += reward

    def mark_success(self, success: bool | None) -> None:
        """Set `success` in the info of this agent's last turn; None removes it."""
        if self.turns:
            info = {key: value for key, value in self.turns[-1].info.items() if key != "success"}
            known = {} if success is None else {"success": success}
            self.turns[-1] = replace(self.turns[-1], info={**info, **known})

    def trajectory(
        self, episode: Episode, status: Status, seconds: float, picture: str
    ) -> Trajectory:
        return Trajectory(
            episode.id,
            episode.task,
            tuple(self.turns),
            status,
            (*self.conversation.messages, *self.unanswered),
            seconds,
            self.agent,
            self.head_start,
            self.tail_ids,
            started=elapsed() - seconds,
            picture=picture,
            tail_images=self.tail_images,
        )

    def segment(self, episode: Episode, seconds: float) -> Trajectory:
        """The turns so far whose outcome is known, as a trajectory of an unfinished episode."""
        # With several agents, the last turn may still earn something while the others act.
        count = max(0, len(self.turns) - bool(self.agent))
        turns, later = tuple(self.turns[:count]), self.turns[count:]
        # The tail is what the model was shown next: a critic reads the value of what is still to
        # come from it.
        follows: Turn | Prompt | None = later[0] if later else self.asked
        tail, tail_images = ints(()), tuple[PlacedImage, ...]()
        if isinstance(follows, Turn) and not follows.forked:
            tail, tail_images = follows.prompt_ids, follows.images
        elif isinstance(follows, Prompt) and not follows.forked:
            tail, tail_images = follows.new_ids, follows.new_images
        return Trajectory(
            episode.id,
            episode.task,
            turns,
            SEGMENT,
            self.conversation.messages,
            seconds,
            self.agent,
            self.head_start,
            tail,
            started=elapsed() - seconds,
            tail_images=tail_images,
        )

    def render_tail(self) -> None:
        """Render what a truncated episode would have shown next."""
        if self.turns and self.unanswered:
            prompt = self.conversation.prompt(self.unanswered)
            self.unanswered = ()
            self.keep_tail(prompt)

    def keep_tail(self, prompt: Prompt) -> None:
        """Keep a prompt that nothing answered, if it extends the last turn."""
        if not prompt.forked:
            self.tail_ids, self.tail_images = prompt.new_ids, prompt.new_images


@dataclass(slots=True)
class _EpisodeState:
    """The state of an episode that is being played."""

    episode: Episode
    started: float
    """The time at which it began (`elapsed`)."""
    report_turns: Report = ignore_reports
    """Takes the turns played so far, if they are to be trained on before the episode is over."""
    agents: dict[str, _AgentState] = field(default_factory=dict)
    answers: int = 0
    """Answers so far, of all agents."""
    picture: str = ""
    """That of the environment's present state."""
    opening_digest: str = ""
    """A digest of what the environment showed at the beginning (`Trajectory.begun`)."""

    def report_segments(self) -> None:
        """Report what each trained agent has played so far."""
        if self.report_turns is ignore_reports:
            return
        seconds = elapsed() - self.started
        segments = [
            replace(state.segment(self.episode, seconds), begun=self.opening_digest)
            for state in self.agents.values()
            if state.role.trained
        ]
        self.report_turns(TurnsPlayed(tuple(segments)))

    def settle(self, actor: str, reward: float, info: Mapping[str, Any]) -> None:
        """Credit the other agents for a step (the actor's turn has its reward already), and mark
        each one's success.
        """
        for agent, earned in earnings(info, actor, reward, tuple(self.agents)).items():
            if agent != actor and earned:
                self.agents[agent].earn(float(earned))
        for agent, state in self.agents.items():
            state.mark_success(success_of(info, agent))


@dataclass(frozen=True, slots=True)
class EnvEpisodeRunner:
    """`EpisodeRunner` of a policy and environments: the parts that all episodes share.

    `others` are the agents that the policy does not play. `own_budgets` are those of environments
    that do not have the usual `budget`. `picture_bytes`: the longest picture of a state that is
    kept; 0 keeps none. `without_others` names environments that may have none of the `others`, as
    those of suites: the policy then plays alone. `requests` answers what the context asks for, by
    default the policy.
    """

    policy: Policy
    renderer: Renderer
    envs: EnvPool
    budget: Budget
    deadline: float
    context: ContextPolicy = FULL
    others: Mapping[str, Role] = field(default_factory=dict)
    own_budgets: Mapping[str, Budget] = field(default_factory=dict)
    picture_bytes: int = 0
    without_others: Collection[str] = ()
    requests: Policy | None = None

    async def play(
        self, assignment: Assignment, report: Report = ignore_reports
    ) -> tuple[Trajectory, ...]:
        """Play an episode to its end, however it ends. Only wrong settings, cancellation and
        defects are raised.
        """
        task, started = assignment.task, elapsed()
        episode = Episode.of(assignment, self.own_budgets.get(task.env, self.budget), report)
        report_turns = report if assignment.reports_turns else ignore_reports
        episode_state = _EpisodeState(episode, started, report_turns)
        branch = None if assignment.start is None else assignment.start.branch
        try:
            env = self.envs.acquire(task.env)
            try:
                with deadline("environment", "episode", self.deadline, episode.clock):
                    status = await self._take_turns(assignment, report, episode_state, env)
            finally:
                # From here on the last turn may have failed, or may earn the verdict on the whole.
                report_turns(TurnsPlayed())
                # An environment left in mid-episode, but not in mid-call, is reusable: the next
                # episode resets it.
                await self.envs.release(task.env, env)
        except RolloutError as error:
            status = Failed.by(error)
        seconds = elapsed() - started
        if not episode_state.agents:  # the environment has not even begun
            return (Trajectory(episode.id, task, (), status, (), seconds, started=started),)
        trained = [state for state in episode_state.agents.values() if state.role.trained]
        return tuple(
            replace(
                state.trajectory(episode, status, seconds, episode_state.picture),
                begun=episode_state.opening_digest,
                branch=branch,
                # The turns that a branch shares are trained on in its parent.
                trained_turns=0 if branch is None else branch.turn,
            )
            for state in trained
        )

    async def _take_turns(
        self, assignment: Assignment, report: Report, episode_state: _EpisodeState, env: LiveEnv
    ) -> Status:
        episode, plan = episode_state.episode, assignment.plan
        began = episode.clock.now() - _seconds_before(assignment.start)
        state, key = await (
            self._begin(episode_state, env)
            if assignment.start is None
            else self._begin_branch(assignment.start, episode_state, env)
        )
        agents = tuple(episode_state.agents) if state.agent else SINGLE_AGENT
        _check_can_branch(plan, agents, env)
        # The task may begin with turns that a conversation gives. They count in the budget.
        given, saved = len(Beginning.of(episode.task.options).turns), 0
        turns = given + len(state.turns)
        # The first turn is always played.
        while not (spent := _spent(episode, turns, began) if turns > given else ""):
            if request := state.role.context.request(state.conversation, state.unanswered):
                ended = await self._summarise(episode_state, state, env, request)
                if ended is not None:
                    return ended
                # A summary is no turn of the budget, but its tokens and seconds count.
                if turns > given and (spent := _spent(episode, turns, began)):
                    break
            if plan is not None and plan.has(state.turns, saved):
                saved += 1
                report(StateSaved(len(state.turns), await env.snapshot()))
            turns += 1
            reply = await self._ask(episode_state, state, env)
            if not isinstance(reply, _Reply):
                return reply
            info: dict[str, Any] = {}
            reward, picture = 0.0, episode_state.picture
            try:
                observation, reward, terminated, truncated, info = await env.step(reply.action)
                episode_state.picture, info = taken(info, self.picture_bytes)
                images, info = images_taken("step", info)
            finally:  # the model's reply is kept even if the environment fails
                state.turns.append(reply.turn(float(reward), info, elapsed(), key, picture))
                state.asked = None
            if state.agent:
                episode_state.settle(state.agent, reward, info)
            key = _state_key(info, observation, images)
            is_over = terminated or truncated
            state = state if is_over else episode_state.agents[next_agent(info, agents)]
            shown = state.role.context.shorten(observation)
            state.unanswered = [
                *state.unanswered,
                Message("tool" if env.tools and state.turns else "user", shown, images=images),
            ]
            if terminated:
                return Terminated()
            if is_over:
                return _truncated("env", episode_state)
        return _truncated(spent, episode_state)

    async def _begin(self, episode_state: _EpisodeState, env: LiveEnv) -> tuple[_AgentState, str]:
        """Reset the environment; returns the agent that acts first, and the name of the state."""
        episode = episode_state.episode
        observation, info = await env.reset(episode.task.seed, episode.task.options)
        episode_state.picture, info = taken(info, self.picture_bytes)
        images, info = images_taken("reset", info)
        agents = agents_in(info)
        episode_state.agents = self._agent_states(episode, agents, info, env)
        state = episode_state.agents[next_agent(info, agents)]
        episode_state.opening_digest = _digest_opening(observation, images, state.agent, info, env)
        shown = opening(info, observation, images, tools=bool(env.tools))
        state.unanswered = [*state.unanswered, *shown]
        state.head_start = env.earned
        return state, _state_key(info, observation, images)

    async def _begin_branch(
        self, start: BranchStart, episode_state: _EpisodeState, env: LiveEnv
    ) -> tuple[_AgentState, str]:
        """Restore the state from which this episode leaves its parent; returns the agent, and the
        name of the state.
        """
        await env.restore(start.state)
        episode, parent = episode_state.episode, start.parent
        next_turn = parent.turns[start.branch.turn]
        states = self._agent_states(episode, SINGLE_AGENT, {}, env)
        (state,) = states.values()
        state.unanswered = ()
        messages = iter(parent.messages)
        # Replay the conversation of the shared turns. Its prompts must come out token for token as
        # they were, else the branch would continue from a context that the policy never saw.
        for turn in start.shared:
            prompt = state.conversation.prompt(_until_answer(messages))
            state.conversation.answer(turn.completion)
            same = np.array_equal(prompt.new_ids, turn.prompt_ids)
            same = same and prompt.new_images == turn.images
            if prompt.forked != turn.forked or not same:
                raise EnvError(
                    f"{parent.id} cannot be gone back to: its prompts, rendered again, are others."
                    " Leave rollout.branches out with this chat template"
                )
        state.unanswered = _until_answer(messages)
        state.turns, state.head_start = list(start.shared), parent.head_start
        episode.usage.sampled_tokens = sum(len(t.completion.token_ids) for t in start.shared)
        episode_state.answers = len(start.shared)
        episode_state.opening_digest, episode_state.picture = parent.begun, next_turn.picture
        episode_state.agents = states
        return state, next_turn.state

    def _agent_states(
        self, episode: Episode, agents: Sequence[str], info: Mapping[str, Any], env: LiveEnv
    ) -> dict[str, _AgentState]:
        others = self.others
        if episode.task.env in self.without_others and others.keys().isdisjoint(agents):
            others = {}
        check_routes(others, agents)
        policy = Role(self.policy, self.renderer, self.context, requests=self.requests)
        states = {}
        for agent in agents:
            role = others.get(agent, policy)
            prompts = (system_prompt_in(info, agent, env.system_prompt), role.context.instructions)
            prompt = "\n\n".join(filter(None, prompts))
            opening = [Message("system", prompt)] if prompt else []
            own = replace(episode, id=f"{episode.id}/{agent}") if agent else episode
            states[agent] = _AgentState(
                agent, role, own, role.renderer.conversation(env.tools), opening
            )
        return states

    async def _summarise(
        self, episode_state: _EpisodeState, state: _AgentState, env: LiveEnv, request: str
    ) -> Status | None:
        """Play the context policy's request as a turn of its own; returns a status if that ends the
        episode.
        """
        # The messages that wait for an answer come after the summary.
        waiting, state.unanswered = state.unanswered, [Message("user", request)]
        reply = await self._ask(episode_state, state, env, state.role.requests)
        state.unanswered = waiting
        if not isinstance(reply, _Reply):
            return reply
        context = state.role.context
        turn = reply.turn(0.0, {"context": context.name}, reply.answered, "")
        state.turns.append(replace(turn, trained=context.trains_requests))
        state.asked = None
        return None

    async def _ask(
        self,
        episode_state: _EpisodeState,
        state: _AgentState,
        env: LiveEnv,
        asked_instead: Policy | None = None,
    ) -> _Reply | Status:
        """The agent's answer to its unanswered messages; a status if its context is full."""
        conversation, policy = state.conversation, asked_instead or state.role.policy
        kept = state.role.context.keep(conversation.shown)
        if kept is not conversation.shown:
            conversation.show(kept)
        prompt = conversation.prompt(state.unanswered)
        state.unanswered = ()
        if len(prompt.ids) >= policy.max_context:
            state.keep_tail(prompt)
            if state.turns:
                return Truncated("context")
            return Failed(
                "data",
                f"the first prompt has {len(prompt.ids)} tokens and the engine's context holds"
                f" {policy.max_context}: raise engine.max_context",
            )
        asked, state.asked = elapsed(), prompt
        # The outcome of every turn before this prompt is known now.
        episode_state.report_segments()
        completion = await policy.answer(state.episode, episode_state.answers, prompt, env)
        episode_state.answers += 1
        answered = elapsed()
        return _Reply(prompt, completion, conversation.answer(completion), asked, answered)


def _until_answer(messages: Iterator[Message]) -> list[Message]:
    """The messages up to the model's next answer, which is consumed but not returned."""
    return list(takewhile(lambda message: not message.is_answer, messages))


def _seconds_before(start: BranchStart | None) -> float:
    """The seconds of a branch's budget that its parent has used up to the branch point."""
    shared = () if start is None else start.shared
    return sum(turn.generate_seconds + turn.env_seconds for turn in shared)


def _check_can_branch(plan: BranchPlan | None, agents: Sequence[str], env: LiveEnv) -> None:
    if plan is None:
        return
    if agents is not SINGLE_AGENT:
        raise ConfigError(
            f"rollout.branches: the environment has the agents {', '.join(agents)}, and branches"
            " are those of a single one: leave rollout.branches out"
        )
    if not env.restorable:
        raise ConfigError(
            "rollout.branches: the environment cannot go back to a state. Write its `snapshot` and"
            " `restore`, or declare it `deterministic` (docs/branches.md), or leave"
            " rollout.branches out"
        )


def _spent(episode: Episode, turns: int, began: float) -> str:
    """The budget's limit that an episode has reached, if any."""
    return episode.usage.spent(turns, episode.clock.now() - began)


def _truncated(limit: str, episode_state: _EpisodeState) -> Truncated:
    for state in episode_state.agents.values():
        state.render_tail()
    return Truncated(limit)


def _state_key(info: Mapping[str, Any], observation: str, images: Sequence[EncodedImage]) -> str:
    """The name of the state that `info`, `observation` and `images` are of."""
    if (key := info.get("state_key")) is not None:
        return str(key)
    shown = "".join([*(image.digest for image in images), observation])
    return blake2b(shown.encode(), digest_size=8).hexdigest()


def _digest_opening(
    observation: str,
    images: Sequence[EncodedImage],
    first: str,
    info: Mapping[str, Any],
    env: LiveEnv,
) -> str:
    """A digest of everything that a reset has shown: the observation and who sees it, the system
    prompts, the history, the tools.
    """
    prompts = [env.system_prompt, info.get("system_prompts"), info.get("history")]
    seen = [image.digest for image in images]
    shown = json.dumps([observation, *seen, first, *prompts, list(env.tools)])
    return blake2b(shown.encode(), digest_size=8).hexdigest()
