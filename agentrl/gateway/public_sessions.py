"""The public session registry, for anyone with the token: `agentrl gateway`. The API key names the
episode.

`TOKEN:NAME` is the key of the episode NAME; a new name begins a new episode. Without a token, the
whole key is the name.
"""

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.flow import Flow, elapsed, now
from agentrl.gateway.call_tree import conversation_of
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.recording import trajectory_of
from agentrl.gateway.refusal import CallRefusedError
from agentrl.gateway.session import AgentSession, CallLimits
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.rollout.budget import Budget, BudgetUsage
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.runner import Episode
from agentrl.rollout.seeds import derive_seed
from agentrl.trajectory import Score, Task, Terminated, Trajectory

_MOST_CALLS = 100_000
"""Of one episode."""


@dataclass(eq=False, slots=True, kw_only=True)
class PublicSessionRegistry(SessionRegistry):
    """Opens an episode for each name. Those that are idle for `config.idle_seconds` are over;
    `ended` gets them.
    """

    policy: EnginePolicy
    renderer: TemplateRenderer
    token: str
    seed: int
    ended: Callable[[AgentSession], None]
    calls: Flow = field(default_factory=lambda: Flow("calls"))
    _named: dict[str, AgentSession] = field(default_factory=dict)
    _opened: int = 0

    def session(self, key: str) -> AgentSession:
        """The episode that a key names, which begins now if it is new.

        Raises:
            CallRefusedError: the token is wrong, or too many episodes are open.
        """
        name = self._name(key)
        found = self._named.get(name)
        if found is None:
            if len(self._named) >= self.config.max_episodes:
                raise CallRefusedError(
                    429, "too_many_episodes", f"{len(self._named)} episodes are open", 1.0
                )
            self._opened += 1
            number = f"{name or 'episode'}-{self._opened}"
            usage = BudgetUsage(Budget(turns=_MOST_CALLS))
            task = Task("gateway", 0, {}, number)
            episode = Episode(number, task, derive_seed(self.seed, number), usage=usage)
            limits = CallLimits(self.config.max_answers, self.config.calls_at_once)
            found = AgentSession(
                episode, self.policy, self.renderer, limits, self.calls, model=self.config.model
            )
            self._named[name] = found
        return found

    def open_session(self, key: str) -> AgentSession:
        """The open episode of a key: a reward that comes later would be that of an empty one.

        Raises:
            CallRefusedError: the token is wrong, or no episode with that name is open.
        """
        found = self._named.get(self._name(key))
        if found is None:
            raise CallRefusedError(
                404,
                "no_such_episode",
                "no episode with this name is open: it has had no call yet, or is over",
            )
        return found

    def _name(self, key: str) -> str:
        """The name in a key.

        Raises:
            CallRefusedError: the token before it is wrong.
        """
        if not self.token:
            return key
        given, rest = key[: len(self.token)], key[len(self.token) :]  # a token may have colons
        right = hmac.compare_digest(given.encode(), self.token.encode())
        if not right or rest[:1] not in ("", ":"):
            raise CallRefusedError(
                401, "invalid_api_key", "the API key does not begin with the token"
            )
        return rest[1:]

    async def sweep(self) -> None:
        """End idle episodes until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.config.idle_seconds / 4))
            for name, session in list(self._named.items()):
                if not session.calls_at_once and session.used + self.config.idle_seconds <= now():
                    self._end(name)

    def end_all(self) -> None:
        """End all episodes."""
        for name in list(self._named):
            self._end(name)

    def _end(self, name: str) -> None:
        session = self._named.pop(name)
        session.closed = True
        self.ended(session)


def conversations_of(session: AgentSession) -> list[tuple[Trajectory, Score | None]]:
    """The rows of an episode, each as a trajectory of its own, with its score if a reward came for
    it.

    The task is named by how the conversation begins, so that the answers to the same question can
    be compared. The reward of the episode counts for each of its conversations, and that of a call
    for the one that it is in.
    """
    found: list[tuple[Trajectory, Score | None]] = []
    rows = session.tree.rows()
    seconds = now() - session.began
    whole = trajectory_of(session, AgentOutcome(), Terminated(), elapsed() - seconds, seconds)
    first = 0
    for number, row in enumerate(rows):
        turns = whole.turns[first : first + len(row)]
        first += len(row)
        begins = row[0].call.opening.hex()
        trajectory = replace(
            whole,
            id=f"{session.episode.id}/{number}",
            task=Task("gateway", 0, {}, begins),
            turns=(replace(turns[0], forked=False), *turns[1:]),
            messages=conversation_of(row),
            dropped={},
        )
        own = None if session.outcome is None else session.outcome.reward
        rewarded = own is not None or any(answer.rewarded for answer in row)
        earned = trajectory.env_return + (own or 0.0)
        found.append((trajectory, Score(earned, {"gateway": earned}) if rewarded else None))
    return found
