"""`EvidenceSettings`: what a judge is shown of a trajectory."""

from collections.abc import Sequence
from typing import Any, Literal

from agentrl.errors import ConfigError
from agentrl.rewards.judge_settings import JudgeSettings
from agentrl.trajectory import Message, Trajectory


class EvidenceSettings(JudgeSettings):
    """The evidence for a judge, besides the settings of its endpoint."""

    about: str = ""
    """Background for the judge: what the task is, what the judged program is."""
    show: Literal["transcript", "answer"] = "transcript"
    """All messages, or only the user's first and the judged program's last."""
    reference: str | None = None
    """The task's option that holds the right answer, shown to the judge."""
    reasons: bool = True
    """Let the judge write a reason before its verdict: better verdicts, but more tokens."""

    def role(self, doing: str) -> str:
        """The first lines of the prompt."""
        return f"You are a strict and impartial judge. {doing} {self.about}".strip()

    def messages(self, trajectory: Trajectory) -> list[dict[str, str]]:
        """The messages to show, as texts: of a picture, a judge gets the size alone."""
        shown: Sequence[Message] = trajectory.messages
        if self.show == "answer":
            own = max((place for place, one in enumerate(shown, 1) if one.given), default=0)
            asked = [message for message in shown[own:] if message.role == "user"][:1]
            shown = asked + [message for message in shown if message.is_answer][-1:]
        return [{"role": message.role, "content": message.described} for message in shown]

    def right_answer(self, trajectory: Trajectory) -> dict[str, Any]:
        """The right answer by its name in the prompt; empty if none is shown.

        Raises:
            ConfigError: the task has none.
        """
        if self.reference is None:
            return {}
        options = trajectory.task.options
        if self.reference not in options:
            raise ConfigError(
                f"the judge should see the task's option {self.reference!r} (reference), but the"
                f" task {trajectory.task.id!r} has the options {sorted(options)}"
            )
        return {"right_answer": options[self.reference]}
