"""The ledger: one fate each, written behind the loop and ahead of the weights, and a resume that
loses nothing.
"""

import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.ledger import write_behind
from agentrl.ledger.ledger import Ledger, read_ledger
from agentrl.ledger.report import explain, tenths_of_percent
from agentrl.trajectory import Task
from tests.ledger.ledger_queries import trained_tasks, why_failed
from tests.properties import examples

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def task(number: int) -> Task:
    return Task("frozen_lake", 2 * number, {"size": 4}, f"train-{number:06d}")


def admit(ledger: Ledger, *numbers: int, members: int = 2, version: int = 0) -> None:
    for number in numbers:
        ledger.admit(number, task(number), version)
        for member in range(members):
            ledger.begin(number, member, 0)


@pytest.mark.parametrize("path", [":memory:", "ledger.sqlite"])
@pytest.mark.parametrize(
    "again",
    [
        lambda ledger: ledger.end(0, 0, 0, "cancelled", "again"),
        lambda ledger: ledger.trained(1, {0: [1.0]}),
        lambda ledger: ledger.end_task(0, "filtered", "again"),
        lambda ledger: ledger.admit(0, task(0), 1),
        lambda ledger: ledger.trained(1, {7: [1.0]}),
        lambda ledger: ledger.end(0, 9, 0, "failed", "never began"),
    ],
)
def test_a_fate_is_final(tmp_path, monkeypatch, path, again):
    monkeypatch.chdir(tmp_path)
    with Ledger(path) as ledger:
        admit(ledger, 0)
        ledger.end(0, 0, 0, "failed", "broke")
        ledger.trained(0, {0: [1.0, 0.0]})
        ledger.flush()
        again(ledger)
        with pytest.raises(RuntimeError, match="have a fate already, or do not exist"):
            ledger.flush()
        with pytest.raises(RuntimeError, match="have a fate already"):
            ledger.begin(0, 5, 0)
    if path != ":memory:":
        with read_ledger(Path(path)) as kept:
            assert (
                kept.episode_fates().failed
                == kept.episode_fates().trained
                == kept.task_fates().trained
                == 1
            )


@pytest.mark.parametrize(
    "wrong", [lambda ledger: ledger.end_task(0, "lost", ""), lambda ledger: ledger.begin(0, 0, 0)]
)
def test_an_unknown_fate_and_a_second_beginning_are_refused_by_the_file_itself(wrong):
    with Ledger(":memory:") as ledger:
        admit(ledger, 0)
        wrong(ledger)
        with pytest.raises(RuntimeError, match="constraint failed"):
            ledger.flush()


def test_two_tasks_with_one_id_are_a_mistake_of_the_task_source():
    with Ledger(":memory:") as ledger:
        ledger.admit(0, task(0), 0)
        ledger.admit(1, task(0), 0)
        with pytest.raises(ConfigError, match="a task source gives each an id of its own"):
            ledger.flush()


def test_what_the_thread_could_not_write_is_said_by_a_later_call(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.trained(0, {7: [1.0]})
        time.sleep(3 * write_behind.PERIOD)
        with pytest.raises(RuntimeError, match="do not exist"):
            ledger.begin(0, 0, 0)


def test_after_a_failure_nothing_is_written_for_what_is_lost_must_be_a_suffix(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        # So that all of it is queued before the first is written.
        with ledger._writer.transaction():
            ledger.trained(0, {7: [1.0]})
            admit(ledger, *range(1000))
        with pytest.raises(RuntimeError, match="do not exist"):
            ledger.flush()
    with read_ledger(path) as kept:
        assert kept.task_fates().total == kept.episode_fates().total == 0


@pytest.mark.parametrize("path", [":memory:", "ledger.sqlite"])
def test_closing_says_what_was_not_written_unless_it_was_said(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(path)
    ledger.trained(0, {7: [1.0]})
    with pytest.raises(RuntimeError, match="do not exist"):
        ledger.close()
    ledger.close()
    with pytest.raises(RuntimeError, match="do not exist"):
        ledger.begin(0, 0, 0)


def test_a_closed_ledger_takes_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        admit(ledger, 0)
    with pytest.raises(RuntimeError, match="it is closed"):
        ledger.flush()


def test_a_closed_ledger_is_one_file(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        admit(ledger, 0)
        assert ledger.task_fates().open == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_another_process_reads_at_once_what_was_flushed_and_soon_what_was_not(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger, read_ledger(path) as other:
        admit(ledger, 0)
        ledger.flush()
        assert other.task_fates().open == 1
        ledger.trained(0, {0: [1.0, 0.0]})
        limit = time.monotonic() + 30
        while other.task_fates().trained < 1:
            assert time.monotonic() < limit
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("fate", "of_open_episodes", "why"),
    [
        ("filtered", "filtered", "all alike"),
        ("stale", "stale", "all alike"),
        ("cancelled", "cancelled", "its task: all alike"),
        ("failed", "cancelled", "its task: all alike"),
    ],
)
def test_the_fate_of_a_task_is_that_of_its_open_episodes_alone(fate, of_open_episodes, why):
    with Ledger(":memory:") as ledger:
        admit(ledger, 0, 1)
        ledger.end(0, 0, 0, "failed", "broke")
        ledger.end_task(0, fate, "all alike")
        assert [(e.fate, e.why) for e in ledger.episodes(0)] == [
            ("failed", "broke"),
            (of_open_episodes, why),
        ]
        assert [e.fate for e in ledger.episodes(1)] == [None, None]
        assert getattr(ledger.task_fates(), fate) == ledger.task_fates().open == 1


@examples(40)
@given(
    tasks=st.lists(
        st.builds(
            Task,
            st.text("abc/:é"),
            st.integers(-(2**70), 2**70),
            st.dictionaries(st.text(), JSON),
            st.text("ab_-/☃"),
        ),
        unique_by=lambda task: task.id,
        max_size=4,
    )
)
def test_a_rewind_gives_the_open_tasks_back_exactly_as_they_were_admitted(tasks):
    with Ledger(":memory:") as ledger:
        for number, given_task in reversed(list(enumerate(tasks))):
            ledger.admit(number, given_task, 3)
        back = ledger.rewind(0)
        assert back == list(enumerate(tasks))
        assert [json.dumps(t.options) for _, t in back] == [json.dumps(t.options) for t in tasks]
        for number, same in back:
            ledger.admit(number, same, 4)
        assert [ledger.task(number).admitted_version for number, _ in back] == [4] * len(tasks)
        assert ledger.next_number() == len(tasks)


def test_a_task_that_is_used_again_keeps_its_first_step_and_counts_its_uses():
    with Ledger(":memory:") as ledger:
        admit(ledger, 0, 1)
        ledger.trained(2, {0: [1.0]})
        for step in (2, 3, 3, 5):
            ledger.reused(step, [task(0).id])
        ledger.trained(3, {1: [1.0]})
        assert [(ledger.task(n).step, ledger.task(n).uses) for n in (0, 1)] == [(2, 5), (3, 1)]
        assert "and used 4 more times" in explain(ledger, "0").sentence
        assert "more times" not in explain(ledger, "1").sentence
        ledger.rewind(3)
        assert [(ledger.task(n).step, ledger.task(n).uses) for n in (0, 1)] == [(2, 2), (None, 0)]
        ledger.rewind(2)
        assert (ledger.task(0).fate, ledger.task(0).uses) == (None, 0)


def test_what_carries_no_loss_is_masked_and_its_task_with_the_last_of_its_episodes():
    with Ledger(":memory:") as ledger:
        admit(ledger, 0, 1, 2, members=2)
        ledger.segment(3, 2, 1, 0, agent="", first=0, turns=2)
        ledger.trained(4, {0: [1.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 0.0]})
        alike = dict.fromkeys(
            ("train-000001/0/0", "train-000001/1/0", "train-000002/0/0"), "they are alike"
        )
        ledger.masked(
            4, {"train-000000/1/0": "too long", **alike, "train-000002/1/0": "its end is old"}
        )
        fates = {record[0]: record[3:] for record in ledger.all_episodes()}
        assert fates == {
            "train-000000/0/0": ("trained", 4, None),
            "train-000000/1/0": ("masked", 4, "too long"),
            "train-000001/0/0": ("masked", 4, "they are alike"),
            "train-000001/1/0": ("masked", 4, "they are alike"),
            "train-000002/0/0": ("masked", 4, "they are alike"),
            # Its first turns were trained on at step 3.
            "train-000002/1/0": (
                "trained",
                4,
                "its end is old",
            ),
        }
        assert [ledger.task(n).fate for n in (0, 1, 2)] == ["trained", "masked", "trained"]
        assert (ledger.episode_fates().masked, ledger.episode_fates().settled) == (4, True)
        assert {(one.fate, one.why, one.count) for one in ledger.reasons("episodes", 9)} == {
            ("masked", "too long", 1),
            ("masked", "they are alike", 3),
        }
        assert (
            explain(ledger, "1").sentence
            == "train-000001 was not trained: it carried no loss in the batch of step 4: they are"
            " alike"
        )
        assert (ledger.trained_steps(5), [number for number, *_ in ledger.outcomes()]) == (
            1,
            [0, 1, 2],
        )
        ledger.rewind(4)
        assert [(ledger.task(n).fate, ledger.task(n).why) for n in (0, 1, 2)] == [(None, None)] * 3
        assert {fate for _, _, _, fate, *_ in ledger.all_episodes()} == {"cancelled"}


def test_a_segment_that_carried_no_loss_is_none():
    with Ledger(":memory:") as ledger:
        admit(ledger, 0)
        ledger.segment(1, 0, 1, 0, agent="a", first=0, turns=3)
        ledger.segment(2, 0, 1, 0, agent="a", first=3, turns=1)
        ledger.masked(2, {}, [("train-000000/1/0", "a")])
        assert [(one.step, one.first) for one in ledger.segments(0)] == [(1, 0)]


@pytest.mark.parametrize("name", ["train-000000/0/0", "train-000001/0/0", "train-000009/0/0"])
def test_only_what_is_in_the_batch_of_a_step_can_be_masked(name):
    ledger = Ledger(":memory:")
    admit(ledger, 0, 1)
    ledger.trained(4, {0: [1.0, 0.0]})
    ledger.masked(3, {name: "why"})
    with pytest.raises(RuntimeError, match="do not exist"):
        ledger.flush()


def before_masked(path: Path) -> None:
    """Make a ledger one of the format without the fate `masked`."""
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, ?, '')", (" OR fate = 'masked'",))
        db.execute("PRAGMA user_version = 3")
    db.close()


def test_a_ledger_from_before_masked_is_read_as_it_is_and_goes_on(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        admit(ledger, 0, 1)
        ledger.end(0, 1, 0, "failed", "engine: gone")
        ledger.begin(0, 1, 1)
        ledger.trained(0, {0: [1.0, 0.5]})
    before_masked(path)
    content = path.read_bytes()
    with read_ledger(path) as old:
        assert (old.task(0).rewards, old.task_fates().trained, old.task_fates().masked) == (
            (1.0, 0.5),
            1,
            0,
        )
        kept = list(old.all_episodes())
    assert path.read_bytes() == content
    with sqlite3.connect(path) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute("UPDATE episodes SET fate = 'masked'")
    db.close()
    with Ledger(path) as ledger:
        assert list(ledger.all_episodes()) == kept
        ledger.rewind(1)
        admit(ledger, 1)
        ledger.trained(1, {1: [1.0, 1.0]})
        ledger.masked(1, dict.fromkeys(("train-000001/0/0", "train-000001/1/0"), "alike"))
    with Ledger(path) as ledger:
        assert (ledger.episode_fates().masked, ledger.task_fates().masked, ledger.damage()) == (
            2,
            1,
            None,
        )


@pytest.mark.parametrize("fate", [None, "failed", "filtered"])
def test_only_what_was_trained_can_be_used_again(fate):
    ledger = Ledger(":memory:")
    admit(ledger, 0)
    if fate is not None:
        ledger.end_task(0, fate, "why")
    ledger.reused(1, [task(0).id])
    with pytest.raises(RuntimeError, match="do not exist"):
        ledger.flush()


def test_a_rewind_forgets_the_segments_of_lost_steps_alone():
    with Ledger(":memory:") as ledger:
        admit(ledger, 0)
        ledger.segment(1, 0, 1, 0, agent="", first=0, turns=3)
        ledger.segment(4, 0, 1, 0, agent="", first=3, turns=1)
        assert [(s.first, s.turns, s.step) for s in explain(ledger, "0").segments] == [
            (0, 3, 1),
            (3, 1, 4),
        ]
        assert [(s.first, s.turns, s.step) for s in explain(ledger, "0/1/0").segments] == [
            (0, 3, 1),
            (3, 1, 4),
        ]
        assert not explain(ledger, "0/0/0").segments
        ledger.rewind(4)
        assert [(s.first, s.turns, s.step) for s in ledger.segments(0)] == [(0, 3, 1)]


def test_a_turn_is_in_one_segment():
    ledger = Ledger(":memory:")
    admit(ledger, 0)
    ledger.segment(1, 0, 1, 0, agent="", first=0, turns=3)
    ledger.segment(2, 0, 1, 0, agent="", first=0, turns=5)
    with pytest.raises(RuntimeError, match="UNIQUE"):
        ledger.flush()


@pytest.mark.parametrize(
    "options", [{"size": (4, 4)}, {"size": {4}}, {1: "one"}, {"slip": float("nan")}]
)
def test_options_that_a_file_would_change_are_refused(options):
    with Ledger(":memory:") as ledger, pytest.raises(ConfigError, match="task t0"):
        ledger.admit(0, Task("frozen_lake", 0, options, "t0"), 0)


def test_a_rewind_opens_what_was_trained_after_it_and_leaves_every_other_fate():
    with Ledger(":memory:") as ledger:
        admit(ledger, 0, 1, 2, 3, 4, 5)
        ledger.trained(0, {1: [1.0, 0.0]})
        ledger.trained(1, {0: [0.5, 0.5]})
        ledger.end_task(2, "filtered", "alike")
        ledger.end_task(3, "failed", "broke")
        ledger.end_task(4, "stale", "old")
        assert list(ledger.outcomes()) == [(1, task(1), (1.0, 0.0)), (0, task(0), (0.5, 0.5))]
        assert ledger.rewind(1) == [(0, task(0)), (5, task(5))]
        assert list(ledger.outcomes()) == [(1, task(1), (1.0, 0.0))]
        fates = ledger.task_fates()
        assert (fates.open, fates.trained, fates.filtered, fates.failed, fates.stale) == (
            2,
            1,
            1,
            1,
            1,
        )
        assert ledger.episode_fates().cancelled == 6
        assert ledger.episode_fates().settled


class Life:
    """A run from its newest checkpoint on, as the operations it would call: random, but for what
    becomes of a task.
    """

    def __init__(self, rng: random.Random, step: int, pending: list[int], next_number: int) -> None:
        self.rng, self.step, self.pending, self.next_number = rng, step, deque(pending), next_number
        self.left = (STEPS - step) * GROUPS
        self.playing: list[int] = []
        self.finished: list[int] = []

    def move(self) -> list[tuple]:
        """The operations of one moment."""
        if len(self.finished) >= GROUPS:
            batch = [
                self.finished.pop(self.rng.randrange(len(self.finished))) for _ in range(GROUPS)
            ]
            self.step += 1
            # One task at a time: that is how the file takes them, so a kill may come between two.
            return [("trained", self.step - 1, {number: [number / 8, 0.0]}) for number in batch]
        if self.left > 0 and len(self.playing) < 2 * GROUPS and self.rng.random() < 0.6:
            return self.admit()
        if not self.playing:
            return []
        number = self.playing.pop(self.rng.randrange(len(self.playing)))
        return self.finish(number)

    def admit(self) -> list[tuple]:
        self.left -= 1
        if self.pending:
            number = self.pending.popleft()
        else:
            number, self.next_number = self.next_number, self.next_number + 1
        self.playing.append(number)
        return [
            ("admit", number, task(number), self.step),
            ("begin", number, 0, 0),
            ("begin", number, 1, 0),
        ]

    def finish(self, number: int) -> list[tuple]:
        operations: list[tuple] = []
        if self.rng.random() < 0.3:
            operations = [("end", number, 1, 0, "failed", "broke"), ("begin", number, 1, 1)]
        if untrained := fate_of(number):
            self.left += 1
            return [*operations, ("end_task", number, untrained, "so it is")]
        self.finished.append(number)
        return operations


STEPS, GROUPS, EVERY = 6, 2, 2


def fate_of(number: int) -> str | None:
    return {3: "filtered", 5: "failed", 6: "stale"}.get(number % 8)


@examples(60)
@given(seed=st.integers(0, 10**9))
def test_runs_killed_anywhere_train_the_same_tasks_as_one_that_was_not(seed):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        checkpoint = 0
        while checkpoint < STEPS:
            with Ledger(path) as ledger:
                open_tasks = ledger.rewind(checkpoint)
                assert [number for number, _ in open_tasks] == [
                    number
                    for number in range(ledger.next_number())
                    if ledger.task(number).fate is None
                ]
                assert ledger.episode_fates().settled
                assert len(trained_tasks(ledger)) == checkpoint * GROUPS
                life = Life(
                    rng, checkpoint, [number for number, _ in open_tasks], ledger.next_number()
                )
                queued: list[tuple] = []
                for _ in range(rng.randrange(1, 50)):
                    queued += life.move()
                    if life.step == STEPS or (life.step % EVERY == 0 and life.step > checkpoint):
                        call(ledger, queued)
                        ledger.flush()
                        queued, checkpoint = [], life.step
                    if life.step == STEPS:
                        break
                # The others die with the process.
                call(ledger, queued[: rng.randint(0, len(queued))])
        with read_ledger(path) as ledger:
            expected = [number for number in range(100) if fate_of(number) is None][
                : STEPS * GROUPS
            ]
            assert trained_tasks(ledger) == [task(number).id for number in expected]
            assert sorted(rewards for _, _, rewards in ledger.outcomes()) == [
                (n / 8, 0.0) for n in expected
            ]
            assert ledger.task_fates().settled
            assert ledger.task_fates().total == expected[-1] + 1
            assert ledger.episode_fates().settled


def call(ledger: Ledger, operations: list[tuple]) -> None:
    for name, *arguments in operations:
        getattr(ledger, name)(*arguments)


CHILD = """
import os, sys
from pathlib import Path
from agentrl.ledger.ledger import Ledger
from agentrl.trajectory import Task

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
saved = folder / "checkpoint"
step = int(saved.read_text()) if saved.exists() else 0
with Ledger(folder / "ledger.sqlite") as ledger:
    pending, number = [n for n, _ in ledger.rewind(step)], ledger.next_number()
    for step in range(step, steps):
        for _ in range(8 - len(pending)):
            pending.append(number)
            number += 1
        batch, pending = pending[:4], pending[4:]
        for n in batch:
            ledger.admit(n, Task("lake", n, {}, f"t{n}"), step)
            for member in range(4):
                ledger.begin(n, member, 0)
        for n in pending:
            ledger.admit(n, Task("lake", n, {}, f"t{n}"), step)
        ledger.trained(step, {n: [1.0] * 4 for n in batch})
        if step % 50 == 49 or step == steps - 1:
            ledger.flush()
            (folder / "unfinished").write_text(str(step + 1))
            os.replace(folder / "unfinished", saved)
"""


@pytest.mark.slow
def test_what_a_killed_process_wrote_is_there_for_the_next(tmp_path):
    saved = tmp_path / "checkpoint"
    rng = random.Random(0)

    def launch(steps: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), str(steps)])

    done = 0
    for _ in range(3):
        process = launch(10**9)
        limit = time.monotonic() + 30
        while not (saved.exists() and int(saved.read_text()) > done):
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = int(saved.read_text())
        with read_ledger(tmp_path / "ledger.sqlite") as ledger:
            steps = [ledger.task(number).step for number, _, _ in ledger.outcomes()]
        assert [steps.count(step) for step in range(done)] == [4] * done
    assert launch(done + 50).wait() == 0
    with read_ledger(tmp_path / "ledger.sqlite") as ledger:
        assert trained_tasks(ledger) == [f"t{number}" for number in range(4 * (done + 50))]
        assert (
            ledger.task_fates().total - ledger.task_fates().trained == ledger.task_fates().open == 4
        )
        assert ledger.episode_fates().settled
        assert ledger.episode_fates().trained == 16 * (done + 50)


def test_the_caller_is_not_held_up_by_the_file(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        file = sqlite3.connect(path, isolation_level=None)
        file.execute("BEGIN IMMEDIATE")  # nobody else can write to it now
        admit(ledger, *range(1000))
        admitted = file.execute("SELECT count(*) FROM tasks").fetchone()
        file.execute("ROLLBACK")
        file.close()
        assert admitted == (0,)
        assert ledger.task_fates().total == 1000


def test_a_file_that_cannot_keep_up_holds_the_caller_back_instead_of_filling_memory(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(write_behind, "BACKLOG", 2000)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        with ledger._writer.transaction():  # the file is busy
            caller = threading.Thread(target=admit, args=(ledger, *range(2000)))
            caller.start()
            caller.join(timeout=0.5)
            assert caller.is_alive()
            assert len(ledger._writer._queue) == 2000
        caller.join(timeout=30)
        assert ledger.episode_fates().open == 4000


def test_reasons_may_hold_anything():
    with Ledger(":memory:") as ledger:
        admit(ledger, 0)
        ledger.end(0, 0, 0, "failed", "half a character: \ud83d")
        ledger.end(0, 1, 0, "failed", "x" * 10**6)
        assert ledger.episode_fates().failed == 2
        assert all(len(why) <= 2000 for why, _ in why_failed(ledger))


@pytest.mark.parametrize("content", ["", "no database", "old"])
def test_a_file_that_is_no_ledger_is_refused(tmp_path, content):
    path = tmp_path / "ledger.sqlite"
    if content == "old":
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE tasks (number INTEGER PRIMARY KEY, id TEXT)")
        db.close()
    else:
        path.write_text(content * 1000)
    with pytest.raises(ConfigError, match=r"ledger\.sqlite is no ledger"):
        read_ledger(path)
    if content:
        with pytest.raises(ConfigError, match=r"ledger\.sqlite is no ledger"):
            Ledger(path)
    with pytest.raises(ConfigError, match="there is no ledger"):
        read_ledger(tmp_path / "nowhere.sqlite")


@pytest.fixture
def told() -> Ledger:
    """One task of each fate, and one episode of each."""
    ledger = Ledger(":memory:")
    admit(ledger, 0, 1, 2, 3, 4, 5, members=3, version=2)
    ledger.end(0, 1, 0, "failed", "environment: it broke")
    ledger.begin(0, 1, 1)
    ledger.end(0, 2, 0, "cancelled", "its group was complete without it")
    ledger.trained(4, {0: [1.0, 0.0]})
    ledger.end_task(1, "filtered", "all rewards are 1")
    ledger.end_task(2, "stale", "too old")
    ledger.end_task(3, "cancelled", "the run ended")
    ledger.end(4, 0, 0, "failed", "engine: gone")
    ledger.end_task(4, "failed", "member 0 failed once")
    return ledger


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("train-000000", "train-000000 was trained at step 4: 2 episodes, mean reward 0.5"),
        ("0", "train-000000 was trained at step 4: 2 episodes, mean reward 0.5"),
        ("1", "train-000001 was not trained: it was filtered: all rewards are 1"),
        ("2", "train-000002 was not trained: it was stale: too old"),
        ("3", "train-000003 was not trained: it was cancelled: the run ended"),
        ("4", "train-000004 was not trained: it failed: member 0 failed once"),
        ("5", "train-000005 was not trained yet: it is running, or was when the run stopped"),
        ("train-000000/0/0", "train-000000/0/0 was trained at step 4"),
        (
            "train-000000/1/0",
            (
                "train-000000/1/0 was not trained: it failed: environment: it broke; "
                "attempt 1 took its place and was trained at step 4"
            ),
        ),
        (
            "train-000000/2/0",
            (
                "train-000000/2/0 was not trained: it was cancelled: its group was complete without"
                " it; its task was trained at step 4"
            ),
        ),
        (
            "train-000001/0/0",
            "train-000001/0/0 was not trained: it was filtered: all rewards are 1",
        ),
        ("train-000002/0/0", "train-000002/0/0 was not trained: it was stale: too old"),
        (
            "train-000003/0/0",
            "train-000003/0/0 was not trained: it was cancelled: its task: the run ended",
        ),
        (
            "train-000004/0/0",
            (
                "train-000004/0/0 was not trained: it failed: engine: gone; its task failed: member"
                " 0 failed once"
            ),
        ),
        (
            "train-000004/1/0",
            "train-000004/1/0 was not trained: it was cancelled: its task: member 0 failed once",
        ),
        ("5/2/0", "5/2/0 was not trained yet: it is running, or was when the run stopped"),
    ],
)
def test_every_fate_is_explained_in_a_sentence(told, name, sentence):
    explanation = explain(told, name)
    assert explanation.sentence == sentence
    assert explanation.task.admitted_version == 2
    assert len(explanation.episodes) == (1 if "/" in name else 4 if name.endswith("0") else 3)


def test_an_episode_of_an_earlier_launch_is_explained_by_the_later_one(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        admit(ledger, 0)
        ledger.end(0, 1, 0, "failed", "broke")
    with Ledger(path) as ledger:
        ledger.rewind(0)
        admit(ledger, 0)
        ledger.trained(0, {0: [1.0, 1.0]})
        assert (
            explain(ledger, "train-000000/0/0").sentence == "train-000000/0/0 was trained at step 0"
        )
        plays = explain(ledger, "train-000000/0/0").episodes
        assert [(e.launch, e.fate) for e in plays] == [(0, "cancelled"), (1, "trained")]
        ledger.rewind(0)
        assert (
            "the run was stopped before a checkpoint"
            in explain(ledger, "train-000000/0/0").sentence
        )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trian-000004", "Did you mean 'train-000004'?"),
        ("train-000009/0/0", "Near it: train-000004, train-000005"),
        ("99", "Ask for a task by its id or its number, for an episode by TASK/member/attempt"),
        ("train-000004/7/0", "It has: train-000004/0/0, train-000004/1/0, train-000004/2/0"),
        ("9" * 40, "no task"),
        ("", "no task"),
    ],
)
def test_an_unknown_id_is_answered_by_the_nearest_ones(told, name, hint):
    with pytest.raises(ConfigError) as error:
        explain(told, name)
    assert hint in str(error.value)


def test_an_empty_ledger_says_so():
    with (
        Ledger(":memory:") as ledger,
        pytest.raises(ConfigError, match="nothing has been admitted yet"),
    ):
        explain(ledger, "0")


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=6))
def test_shares_sum_to_a_hundred_percent(counts):
    shares = tenths_of_percent(counts)
    assert sum(shares) == 1000
    assert all(
        abs(share - 1000 * count / sum(counts)) < 1
        for share, count in zip(shares, counts, strict=True)
    )


def test_tallies_agree_with_fates_and_name_an_example(told):
    for kind, fates in (("tasks", told.task_fates()), ("episodes", told.episode_fates())):
        tallies = told.tallies(kind)
        assert sum(tally.count for tally in tallies) == fates.total
        for tally in tallies:
            assert tally.count == getattr(fates, tally.fate)
            record = explain(told, tally.example)
            assert tally.fate in {
                record.task.fate or "open",
                *(e.fate or "open" for e in record.episodes),
            }
    assert told.open_episodes(2) == ["train-000005/0/0", "train-000005/1/0"]
    assert told.reasons("episodes", 1)[0].count == 3


def left_by_a_killed_run(path, into):
    """A copy of what a run that goes on has in its folder, as it would be if it were killed now."""
    into.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        shutil.copyfile(path.parent / name, into / name)
    return into / path.name


def stamps(folder):
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (*folder.iterdir(),)
    } | {".": folder.stat().st_mtime_ns}


def test_reading_a_ledger_writes_nothing_beside_it_whether_its_run_goes_on_has_ended_or_was_killed(
    tmp_path,
):
    path = tmp_path / "run" / "ledger.sqlite"
    path.parent.mkdir()
    with Ledger(path) as ledger:
        admit(ledger, 0)
        ledger.flush()
        goes_on = set(stamps(path.parent))
        with read_ledger(path) as reader:
            assert reader.task_fates().open == 1
        assert set(stamps(path.parent)) == goes_on
        killed = left_by_a_killed_run(path, tmp_path / "killed")
    for one in (path, killed):
        before = stamps(one.parent)
        for _ in range(2):
            with read_ledger(one) as reader:
                assert reader.task_fates().open == 1
                assert stamps(one.parent) == before
        assert stamps(one.parent) == before


def test_a_copy_of_a_ledger_is_of_one_moment_also_if_its_log_begins_anew_meanwhile(
    tmp_path, monkeypatch
):
    path = tmp_path / "ledger.sqlite"
    # As on another machine.
    monkeypatch.setattr("agentrl.ledger.ledger._is_in_use", lambda path: False)
    with Ledger(path) as ledger:
        admit(ledger, 0)
        ledger.sync()  # into the file: what is written now may begin the log anew
        copy, copied = shutil.copyfile, []

        def copyfile(source, into):
            copy(source, into)
            copied.append(str(source))
            if len(copied) == 1:  # after the file, before its log
                admit(ledger, *range(1, 200))
                ledger.sync()
                admit(ledger, 200)
                ledger.flush()

        monkeypatch.setattr(shutil, "copyfile", copyfile)
        with read_ledger(path) as reader:
            assert reader.task_fates().open == 201
            assert reader.damage() is None
    assert len(copied) == 4


def test_what_is_no_ledger_is_named_also_where_a_copy_is_read(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"no ledger" * 1000)
    Path(f"{path}-wal").write_bytes(b"no log")
    with pytest.raises(ConfigError, match=f"{path} is no ledger that can be read"):
        read_ledger(path)
