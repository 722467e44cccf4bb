"""Reports on a ledger, in sentences and tables: the fates in a run, and why a task or episode was
or was not trained.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from rich.markup import escape
from rich.table import Table

from agentrl.errors import ConfigError
from agentrl.ledger.ledger import (
    EpisodeRecord,
    Fate,
    LedgerReader,
    SegmentRecord,
    Tally,
    TaskRecord,
)
from agentrl.plugins import nearest

_PHRASES = {
    None: "is running, or was when the run stopped",
    "trained": "was trained at step {step}",
    "masked": "carried no loss in the batch of step {step}: {why}",
    "filtered": "was filtered: {why}",
    "stale": "was stale: {why}",
    "cancelled": "was cancelled: {why}",
    "failed": "failed: {why}",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything the ledger knows of one task or episode.

    `sentence` says why it was or was not trained. `episodes` are those of the task, or all plays of
    the one episode; `segments` are the parts of them that were trained on before they ended.
    """

    id: str
    sentence: str
    task: TaskRecord
    episodes: tuple[EpisodeRecord, ...]
    segments: tuple[SegmentRecord, ...]


def explain(ledger: LedgerReader, name: str) -> Explanation:
    """Explain why a task ("train-000012", or "12") or an episode ("train-000012/3/0") was or was
    not trained.

    Raises:
        ConfigError: there is no such task or episode.
    """
    task = _find_task(ledger, name)
    if task is not None:
        segments = tuple(ledger.segments(task.number))
        return Explanation(
            task.task.id, _explain_task(task), task, tuple(ledger.episodes(task.number)), segments
        )
    task_name, *place = name.rsplit("/", 2)
    task = _find_task(ledger, task_name)
    if task is None:
        raise ConfigError(_no_such_task(ledger, task_name))
    episodes = ledger.episodes(task.number)
    plays = [e for e in episodes if [str(e.member), str(e.attempt)] == place]
    if not plays:
        known = dict.fromkeys(f"{task.task.id}/{e.member}/{e.attempt}" for e in episodes)
        raise ConfigError(
            f"{task.task.id} has no episode {name!r}. It has: {', '.join(known) or 'none yet'}"
        )
    segments = tuple(
        s for s in ledger.segments(task.number) if [str(s.member), str(s.attempt)] == place
    )
    return Explanation(
        name, _explain_episode(name, task, plays[-1], episodes), task, tuple(plays), segments
    )


def fates_table(tasks: Sequence[Tally], episodes: Sequence[Tally]) -> Table:
    """The number of tasks and episodes with each fate; the shares of each sum to 100.0 %."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("fate")
    for kind in ("tasks", "episodes"):
        for column in (kind, "%"):
            table.add_column(column, justify="right")
        table.add_column("such as", overflow="fold")
    cells = {}
    for kind, tallies in (("tasks", tasks), ("episodes", episodes)):
        shares = tenths_of_percent([tally.count for tally in tallies])
        for tally, share in zip(tallies, shares, strict=True):
            cells[tally.fate, kind] = (
                f"{tally.count:,}",
                f"{share / 10:.1f}",
                escape(tally.example),
            )
    for fate in (*get_args(Fate), "open"):
        if (fate, "tasks") in cells or (fate, "episodes") in cells:
            row = [
                cell
                for kind in ("tasks", "episodes")
                for cell in cells.get((fate, kind), ("0", "0.0", ""))
            ]
            table.add_row(fate, *row)
    return table


def reasons_table(tasks: Sequence[Tally], episodes: Sequence[Tally]) -> Table:
    """The most common reasons why tasks and episodes were not trained."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("what", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("why", overflow="fold")
    table.add_column("such as", overflow="fold")
    for kind, reasons in (("tasks", tasks), ("episodes", episodes)):
        for reason in reasons:
            table.add_row(
                f"{kind} {reason.fate}",
                f"{reason.count:,}",
                escape(reason.why),
                escape(reason.example),
            )
    return table


def details_table(explanation: Explanation) -> Table:
    """A table of the task's details."""
    record = explanation.task
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    rows = {
        "task": (
            f"{record.task.id}, number {record.number}, admitted under version"
            f" {record.admitted_version}"
        ),
        "environment": (
            f"{record.task.env}, seed {record.task.seed}, options"
            f" {json.dumps(dict(record.task.options))}"
        ),
        "rewards": "  ".join(f"{reward:g}" for reward in record.rewards),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, escape(value))
    return table


def episodes_table(explanation: Explanation) -> Table:
    """A table of the explained episodes."""
    table = Table("episode", "launch", "fate", "step", "why", box=None, padding=(0, 2, 0, 0))
    for e in explanation.episodes:
        step = "" if e.step is None else str(e.step)
        name = f"{explanation.task.task.id}/{e.member}/{e.attempt}"
        table.add_row(escape(name), str(e.launch), e.fate or "open", step, escape(e.why or ""))
    return table


def segments_table(explanation: Explanation) -> Table:
    """A table of the parts of the explained episodes that were trained on before they ended."""
    table = Table("segment", "launch", "turns", "trained at step", box=None, padding=(0, 2, 0, 0))
    for s in explanation.segments:
        name = f"{explanation.task.task.id}/{s.member}/{s.attempt}" + (
            f" {s.agent}" if s.agent else ""
        )
        table.add_row(
            escape(name), str(s.launch), f"{s.first} to {s.first + s.turns - 1}", str(s.step)
        )
    return table


def tenths_of_percent(counts: Sequence[int]) -> list[int]:
    """The shares of `counts` in tenths of a percent, rounded so that they sum to 1000 (by largest
    remainders).
    """
    total = sum(counts)
    shares = [count * 1000 // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] * 1000 % total, reverse=True)
    for i in by_remainder[: 1000 - sum(shares)]:
        shares[i] += 1
    return shares


def _find_task(ledger: LedgerReader, name: str) -> TaskRecord | None:
    named = ledger.task_named(name)
    # A longer number may not fit into SQLite's integers.
    if named is None and name.isdecimal() and len(name) < 19:
        return ledger.task(int(name))
    return named


def _no_such_task(ledger: LedgerReader, name: str) -> str:
    near = ledger.neighbours(name)
    digits = "".join(character for character in name if character.isdecimal())[-18:]
    same_number = ledger.task(int(digits)) if digits else None
    if same_number is not None:
        near.insert(0, same_number.task.id)
    if not near:
        return f"no task {name!r}: nothing has been admitted yet"
    return (
        f"no task {name!r}.{nearest(name, near)} Near it: {', '.join(dict.fromkeys(near))}. Ask for"
        " a task by its id or its number, for an episode by TASK/member/attempt, such as"
        f" {near[0]}/0/0"
    )


def _explain_task(task: TaskRecord) -> str:
    fate = _fate_of(task)
    if task.fate == "trained":
        mean = sum(task.rewards) / max(len(task.rewards), 1)
        again = f", and used {task.uses - 1} more times" if task.uses > 1 else ""
        return f"{task.task.id} {fate}: {len(task.rewards)} episodes, mean reward {mean:g}{again}"
    return f"{task.task.id} was not trained{' yet' if task.fate is None else ''}: it {fate}"


def _explain_episode(
    name: str, task: TaskRecord, episode: EpisodeRecord, episodes: Sequence[EpisodeRecord]
) -> str:
    if episode.fate == "trained":
        return f"{name} {_fate_of(episode)}"
    sentence = (
        f"{name} was not trained{' yet' if episode.fate is None else ''}: it {_fate_of(episode)}"
    )
    # Attempts are counted anew in each launch.
    played = (episode.launch, episode.attempt)
    later = [e for e in episodes if e.member == episode.member and (e.launch, e.attempt) > played]
    if later:
        last = max(later, key=lambda e: (e.launch, e.attempt))
        successor = f"attempt {last.attempt}" + (
            f" of launch {last.launch}" if last.launch != episode.launch else ""
        )
        return f"{sentence}; {successor} took its place and {_fate_of(last)}"
    if task.fate is not None and episode.why not in (task.why, f"its task: {task.why}"):
        return f"{sentence}; its task {_fate_of(task)}"
    return sentence


def _fate_of(record: TaskRecord | EpisodeRecord) -> str:
    return _PHRASES[record.fate].format(step=record.step, why=record.why)
