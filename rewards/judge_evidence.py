"""`EvidenceSettings`: what a judge is shown of a trajectory."""

from typing import Any, Literal

from agentrl.errors import ConfigError
from agentrl.rewards.judge_settings import JudgeSettings
from agentrl.trajectory import Trajectory


class EvidenceSettings(JudgeSettings):
    """What a judge is shown, beside how it is asked."""

    about: str = ""
    """What the judge has to know beforehand: what the task is, who the judged program is."""
    show: Literal["transcript", "answer"] = "transcript"
    """All messages, or the first of the user and the last of the program under judgement."""
    reference: str | None = None
    """The task's option that holds the right answer, shown to the judge."""
    reasons: bool = True
    """Let the judge write a reason before its verdict. Better verdicts, more tokens."""

    def role(self, doing: str) -> str:
        """The first lines of the prompt."""
        return f"You are a strict and impartial judge. {doing} {self.about}".strip()

    def messages(self, trajectory: Trajectory) -> list[dict[str, str]]:
        """The messages that are shown."""
        messages = [{"role": message.role, "content": message.content} for message in trajectory.messages]
        if self.show == "transcript":
            return messages
        asked = [message for message in messages if message["role"] == "user"][:1]
        return asked + [message for message in messages if message["role"] == "assistant"][-1:]

    def right_answer(self, trajectory: Trajectory) -> dict[str, Any]:
        """The right answer by the name it has in the prompt, where one is shown.

        Raises:
            ConfigError: the task has none.
        """
        if self.reference is None:
            return {}
        options = trajectory.task.options
        if self.reference not in options:
            raise ConfigError(
                f"the judge shall see the task's option {self.reference!r} (reference), but the task "
                f"{trajectory.task.id!r} has the options {sorted(options)}"
            )
        return {"right_answer": options[self.reference]}
