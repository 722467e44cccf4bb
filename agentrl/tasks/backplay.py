"""`Backplay`: a curriculum from the middle of recorded episodes, whose tasks begin near their end
first, and nearer to their start as the policy succeeds ("Backplay", C. Resnick et al.,
arXiv:1807.06919).

    recorded:    start ─ answer 0 ─ answer 1 ─ answer 2 ─ answer 3 ─ success
    3 turns left:        given      played ...
    1 turn left:         given      given      given      played ...

Answers are given again by the option `begin` (`agentrl/hosting/beginnings.py`), so that any
environment will do which replies the same to the same answers.
"""

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from pydantic import Field

from agentrl.conversation.chats import as_json
from agentrl.errors import ConfigError
from agentrl.hosting.beginnings import BEGIN, Beginning, GivenTurn
from agentrl.rollout.seeds import derive_seed
from agentrl.settings.base import NameText, Settings
from agentrl.tasks.saved_rows import saved_rows
from agentrl.tokens.arrays import at_least
from agentrl.trajectory import SEGMENT, Message, Task, ToolCall


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """An episode that succeeded, as far as is needed to begin in the middle of it."""

    seed: int
    options: Mapping[str, Any]
    turns: Sequence[GivenTurn]
    """All of them, those included that were given when it began."""
    problem: str = field(compare=False)
    """A digest of its seed and its options: equal for all recordings of one task."""

    def task(self, env: str, left: int, name: str) -> Task:
        """The task that begins so many turns before its end, or at its start."""
        given = self.turns[: max(0, len(self.turns) - left)]
        begin = {BEGIN: [turn.option() for turn in given]} if given else {}
        return Task(env, self.seed, {**self.options, **begin}, name)


class Backplay:
    """`Curriculum`: tasks begin in the middle of recorded episodes that have succeeded.

    Which recording a task has, and where it begins, depends on its index, the run's seed and the
    outcomes observed before, so a resumed run goes on with the same tasks. All recordings of one
    task are either trained on or held out. Held-out tasks are each recording once.

    Raises:
        ConfigError: no recording of this environment can be begun in.
    """

    class Config(Settings):
        """The recordings, and the pace."""

        path: Path
        """The folder of the run that has played the episodes. It must not go on: a resume on other
        episodes than a run has begun with is refused."""
        recorded_env: NameText | None = None
        """The environment's name in the recordings; by default the name it has here."""
        success_at: float = 0.5
        """An episode with at least this score has succeeded: those that are recorded, and those
        that are played."""
        harder_at: float = Field(0.5, gt=0, le=1)
        """The success rate at which tasks begin one turn earlier."""
        groups: int = Field(8, ge=1)
        """That rate is the mean over so many groups that began as early as any."""
        review: float = Field(0.25, ge=0, le=1)
        """Share of tasks that begin nearer to the end than they could by now, so that it is not
        forgotten."""
        held_out: float = Field(0.1, ge=0, le=1)
        """Share of the recorded tasks that are evaluated on, and not trained on."""
        held_out_left: int | None = Field(None, ge=1)
        """Held-out tasks begin so many turns before the end of the recording; by default at its
        start."""

    def __init__(
        self,
        settings: Config,
        env: str,
        seed: int,
        split: str = "train",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if env.startswith("agent:"):
            raise ConfigError(
                f"tasks=backplay gives recorded answers to an environment, and {env} is a program,"
                " which asks as it likes: choose other tasks"
            )
        self._settings, self._env, self._seed, self._split = settings, env, seed, split
        self._episodes = _split(
            _read_episodes(settings, settings.recorded_env or env), settings, split
        )
        self._longest = max(len(one.turns) for one in self._episodes)
        self._left = 1
        self._recent: deque[float] = deque(maxlen=settings.groups)

    def __len__(self) -> int:
        """The number of recordings."""
        return len(self._episodes)

    @property
    def fingerprint(self) -> str:
        """A digest of the recordings: equal for equal ones."""
        return _digest([(one.problem, [t.option() for t in one.turns]) for one in self._episodes])

    def task(self, index: int) -> Task:
        """The task of this index: a recording, and where to begin in it, that are drawn now."""
        if self._split != "train":
            place, left = index % len(self), self._settings.held_out_left or self._longest
        else:
            rng = Random(derive_seed(self._seed, "backplay", index))
            place, left = rng.randrange(len(self)), self._left
            if left > 1 and rng.random() < self._settings.review:
                left = rng.randrange(1, left)
        episode = self._episodes[place]
        left = min(left, len(episode.turns))
        return episode.task(self._env, left, f"{self._split}-{index:06d}@{place}-{left}")

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        """Count the outcome of a task that began as early as any; after enough of them, tasks begin
        earlier.
        """
        # Tasks in review, and those that began before the last change, do not count.
        if int(task.id.rpartition("-")[2]) != self._left:
            return
        settings = self._settings
        self._recent.append(fmean(at_least(one, settings.success_at) for one in rewards_G))
        enough = len(self._recent) == settings.groups
        if enough and self._left < self._longest and fmean(self._recent) >= settings.harder_at:
            self._left += 1
            self._recent.clear()

    def metrics(self) -> dict[str, float]:
        """How early tasks begin, and the success rate of those that begin so early."""
        rate = {"curriculum/success": fmean(self._recent)} if self._recent else {}
        return {"curriculum/turns_left": float(self._left), **rate}


def _split(
    episodes: Sequence[RecordedEpisode], settings: Backplay.Config, split: str
) -> list[RecordedEpisode]:
    """The episodes of a split. Tasks are held out in the order of their digests: at least one if
    any, and all only if that is asked for.
    """
    problems = sorted({one.problem for one in episodes})
    count = ceil(settings.held_out * len(problems))
    held_out = set(problems[: count if settings.held_out == 1 else min(count, len(problems) - 1)])
    chosen = [one for one in episodes if (one.problem in held_out) == (split == "held-out")]
    if not chosen:
        raise ConfigError(
            f"tasks.path: {settings.path} has recordings of {len(problems)} tasks, of which"
            f" tasks.held_out={settings.held_out:g} leaves none for the {split} tasks: "
            + (
                "raise it, or write evaluation.tasks=0"
                if split == "held-out"
                else "lower it, or record more"
            )
        )
    return chosen


def _read_episodes(settings: Backplay.Config, env: str) -> list[RecordedEpisode]:
    folder, found = settings.path / "trajectories", []
    if not folder.is_dir():
        raise ConfigError(
            f"tasks.path: {settings.path} has no folder trajectories/: name the folder of a run"
        )
    unfit: Counter[str] = Counter()
    for _, row in saved_rows(folder):
        if row["detail"] == SEGMENT.limit:
            continue  # a part of an episode, whose end is in another row
        read = _read_episode(row, settings, env)
        if isinstance(read, str):
            unfit[read] += 1
        else:
            found.append(read)
    if not found:
        why = ", ".join(f"{count} {reason}" for reason, count in unfit.most_common())
        raise ConfigError(
            f"tasks.path: no episode of {settings.path} can be begun in the middle of:"
            f" {why or 'there is none'}"
        )
    return found


def _read_episode(
    row: Mapping[str, Any], settings: Backplay.Config, env: str
) -> RecordedEpisode | str:
    """The episode of a row, or why no task can begin in it."""
    if row["env"] != env:
        return f"were played in {row['env']!r} and not in {env!r} (tasks.recorded_env)"
    if row["score"] is None or not at_least(row["score"], settings.success_at):
        return f"have no score of {settings.success_at:g} or more (tasks.success_at)"
    if row["agent"]:
        return "have several agents"
    turns = list(_given_turns(row["messages"]))
    if not turns or len(turns) != len(row["turns"]):
        return "show pictures, or have turns that are no steps of the environment"
    options = json.loads(row.get("options") or "{}")
    before = Beginning.of(options).turns
    own = {key: value for key, value in options.items() if key != BEGIN}
    problem = _digest([row["seed"], own])
    return RecordedEpisode(row["seed"], own, (*before, *turns), problem)


def _given_turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[GivenTurn]:
    """The answers of a conversation, each with the message that follows; none where another number
    follows, or pictures are shown.
    """
    if any(message.get("images") for message in messages):
        return
    answers = [
        at
        for at, message in enumerate(messages)
        if message["role"] == "assistant" and not message.get("given")
    ]
    for at, following in zip(answers, [*answers[1:], None], strict=True):
        # One message has to stand between two answers: the reply of the environment.
        if following is not None and following != at + 2:
            return
        reply = messages[at + 1]["content"] if at + 1 < len(messages) else None
        row = messages[at]
        calls = tuple(ToolCall(**call) for call in json.loads(row["tool_calls"] or "[]"))
        answer = Message(row["role"], row["content"], row["reasoning"] or "", calls)
        chat = as_json(answer)
        plain = chat == {"role": "assistant", "content": answer.content}
        yield GivenTurn(answer.content, reply, {} if plain else chat)


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
