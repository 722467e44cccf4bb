"""`AnswerRule`: what the rules share that hold the model's last message against a right answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from agentrl.errors import ConfigError
from agentrl.settings.base import NameText, Settings
from agentrl.trajectory import Score, Task, Trajectory

MAX_MESSAGE_CHARACTERS = 20_000
"""Characters of a message that are looked at: its last ones, where answers stand."""


class AnswerSettings(Settings):
    """The places of the answer and of the right answer."""

    gold: NameText = "answer"
    """The task's option that holds the right answer, or a list of them."""
    tag: NameText | None = None
    """The answer is what stands in the last `<tag>...</tag>`; by default the whole last message."""


class AnswerRule(ABC):
    """A rule on (the answer, the right ones); write `right`. An answer that is missing is wrong."""

    isolation: Literal["inline", "process"] = "inline"

    class Config(AnswerSettings):
        """The places of the answers."""

    def __init__(self, config: AnswerSettings) -> None:
        self._where = config

    def content(self, trajectory: Trajectory) -> tuple[str | None, tuple[Any, ...]]:
        """The answer, and the right ones.

        Raises:
            ConfigError: the task has no right answer.
        """
        return answer_of(trajectory, self._where.tag), self.golds(trajectory.task)

    def golds(self, task: Task) -> tuple[Any, ...]:
        """The right answers of a task.

        Raises:
            ConfigError: it has none.
        """
        return golds_of(task, self._where.gold)

    def check_task(self, task: Task) -> None:
        """Check that the task has right answers of the form that the rule needs, as far as that is
        quickly seen.

        Raises:
            ConfigError: it has not.
        """
        golds = self.golds(task)
        if self.isolation == "inline":
            for gold in golds:
                self.right("", gold)

    def evaluate(self, content: tuple[str | None, Sequence[Any]]) -> Score | float:
        """1 where the answer is one of the right ones, else 0."""
        answer, golds = content
        return 0.0 if answer is None else float(any(self.right(answer, gold) for gold in golds))

    @abstractmethod
    def right(self, answer: str, gold: Any) -> bool:
        """True if this is the right answer."""


def answer_of(trajectory: Trajectory, tag: str | None = None) -> str | None:
    """The end of the model's last message, or what stands in its last `<tag>`; None where there is
    none.
    """
    replies = (message.content for message in reversed(trajectory.messages) if message.is_answer)
    text = next(replies, "").strip()[-MAX_MESSAGE_CHARACTERS:]
    if tag is None:
        return text or None
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def golds_of(task: Task, key: str) -> tuple[Any, ...]:
    """The right answers of a task.

    Raises:
        ConfigError: it has none under this option.
    """
    named = f"task {task.id!r}" if task.id else "the task"
    if key not in task.options:
        raise ConfigError(
            f"{named} has no option {key!r} with its right answer; it has"
            f" {', '.join(map(repr, task.options)) or 'no options'}. Write gold: OPTION, or give"
            " tasks the option"
        )
    gold = task.options[key]
    golds = tuple(gold) if isinstance(gold, list | tuple) else (gold,)
    if not golds or any(one is None or one == "" for one in golds):
        raise ConfigError(
            f"{named} has the option {key!r}, but it is {gold!r:.80} and no right answer"
        )
    return golds


def checked(option: str, gold: Any, read: Callable[[Any], Any]) -> Any:
    """`read(gold)`, of a right answer that has to be of some form.

    Raises:
        ConfigError: it is not.
    """
    try:
        return read(gold)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"the task's option {option!r} is {gold!r:.80}: {error}") from error
