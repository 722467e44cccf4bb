"""`begin`, an option of any task: its episodes begin where some answers have led.

    options: {begin: [{answer: right, reply: "You are at (0, 1)."}, {answer: down}]}

The environment is reset, and gets the answers one by one. Where a `reply` is written, what it
replies has to be that. All of this stands before the first prompt, as messages that were given
with the task: the model reads them, and is never trained on them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ConfigError, ReplayError
from agentrl.hosting.observations import IMAGES
from agentrl.protocols.env import ResetResult, StepResult

BEGIN = "begin"
"""The name of the option. No environment sees it."""


@dataclass(frozen=True, slots=True)
class GivenTurn:
    """An answer that is given when an episode begins."""

    answer: str
    """The action, as the environment gets it."""
    reply: str | None = None
    """What the environment has to reply; None for anything."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """The answer as a message of a chat, if it is more than its text."""

    def option(self) -> dict[str, Any]:
        """It as an entry of the option `begin`."""
        entry: dict[str, Any] = {"answer": self.answer}
        if self.reply is not None:
            entry["reply"] = self.reply
        return {**entry, "message": dict(self.message)} if self.message else entry


@dataclass(frozen=True, slots=True)
class Beginning:
    """The turns that are given when an episode begins."""

    turns: Sequence[GivenTurn] = ()

    @staticmethod
    def of(options: Mapping[str, Any]) -> "Beginning":
        """That of the options of a task.

        Raises:
            ConfigError: `begin` is not a list of answers.
        """
        written = options.get(BEGIN)
        if written is None:
            return Beginning()
        if not isinstance(written, list | tuple):
            raise ConfigError(
                f"the option {BEGIN!r} of a task is {written!r:.80}: write a list, such as"
                ' [{answer: "up", reply: "You are at (0, 1)."}]'
            )
        return Beginning(tuple(map(_given_turn, written)))

    async def play(
        self, begun: ResetResult, step: Callable[[str], Awaitable[StepResult]], *, tools: bool
    ) -> tuple[ResetResult, float]:
        """Give the answers to an environment that was just reset. `tools`: its replies are results
        of tools.

        Returns:
            the last reply as that of a reset, with all messages before it in `info["history"]`;
            and the sum of the rewards

        Raises:
            ReplayError: the environment does not reply what was recorded, or cannot be brought
                there.
        """
        observation, info = begun
        if "agents" in info:
            raise ReplayError(
                f"the option {BEGIN!r} gives the answers of a single agent, and the environment has"
                f" the agents {info['agents']!r:.80}: leave it out"
            )
        _check_text(info, "its reset")
        kept = {key: info[key] for key in ("system_prompts",) if key in info}
        history, earned = [*(info.get("history") or ())], 0.0
        role = "user"
        for number, turn in enumerate(self.turns):
            answer = turn.message or {"role": "assistant", "content": turn.answer}
            history += [{"role": role, "content": observation}, answer]
            observation, reward, terminated, truncated, info = await step(turn.answer)
            if terminated or truncated:
                raise ReplayError(
                    f"the answer of turn {number}, given again, ended the episode, and"
                    f" {len(self.turns)} are to be given before it goes on. {CHANGED}"
                )
            _check_text(info, f"turn {number}")
            if turn.reply is not None and turn.reply != observation:
                raise ReplayError(
                    f"the answer of turn {number}, given again, was answered by"
                    f" {observation!r:.300}, and {turn.reply!r:.300} was recorded. {CHANGED}"
                )
            earned += float(reward)
            role = "tool" if tools else "user"
        return (observation, {**kept, **info, "history": history}), earned


CHANGED = (
    "Either the environment is not deterministic (more than the seed, the options and the answers"
    " decides what it replies), or its code, its data or the config have changed since then"
)


def _given_turn(written: Any) -> GivenTurn:
    match written:
        case {"answer": str(answer), **rest} if not rest.keys() - {"reply", "message"}:
            reply, message = rest.get("reply"), rest.get("message") or {}
            if isinstance(reply, str | None) and isinstance(message, Mapping):
                return GivenTurn(answer, reply, message)
    raise ConfigError(
        f"the option {BEGIN!r} of a task has the entry {written!r:.200}: write"
        " {answer: TEXT, reply: TEXT}, of which the reply may be left out"
    )


def _check_text(info: Mapping[str, Any], where: str) -> None:
    if IMAGES in info:
        raise ReplayError(
            f"{where} shows pictures, and messages that are given with a task are text: leave the"
            f" option {BEGIN!r} out"
        )
