"""The ledger: one fate each, written ahead, and a rewind that loses nothing."""

import random
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.ledger import Ledger


def test_a_fate_is_final():
    with Ledger(":memory:") as ledger:
        ledger.admit(0, "t0", 0)
        ledger.begin(0, "t0/0")
        ledger.end("t0/0", "failed", "broke")
        with pytest.raises(RuntimeError, match="a fate already"):
            ledger.end("t0/0", "cancelled", "again")
        ledger.trained(0, [0])
        with pytest.raises(RuntimeError, match="a fate already"):
            ledger.trained(1, [0])
        with pytest.raises(RuntimeError, match="do not exist"):
            ledger.trained(1, [7])


def test_an_unknown_fate_is_refused_by_the_file_itself():
    with Ledger(":memory:") as ledger:
        ledger.admit(0, "t0", 0)
        with pytest.raises(sqlite3.IntegrityError):
            ledger.end_task(0, "lost", "")


@given(seed=st.integers(0, 10**9))
def test_runs_killed_anywhere_train_the_same_tasks_as_one_that_was_not(seed):
    rng = random.Random(seed)
    steps, groups, every = 8, 2, 3
    ledger = Ledger(":memory:")
    checkpoint = 0
    while checkpoint < steps:
        pending = ledger.rewind(checkpoint)
        ledger._launch += 1  # as reopening the file does
        step, open_tasks = checkpoint, list(pending)
        kill_after = rng.randrange(1, 40)
        for moment in range(10**6):
            if moment == kill_after:
                break
            admitted = groups * steps - len(ledger.trained_tasks()) - len(open_tasks) > 0
            if admitted and len(open_tasks) < 2 * groups and rng.random() < 0.7:
                number = ledger.next_number()
                ledger.admit(number, f"t{number}", step)
                ledger.begin(number, f"t{number}/0")
                open_tasks.append(number)
            elif len(open_tasks) >= groups:
                rng.shuffle(open_tasks)
                batch, open_tasks = open_tasks[:groups], open_tasks[groups:]
                ledger.trained(step, batch)
                step += 1
                if step % every == 0 or step == steps:
                    checkpoint = step
                if step == steps:
                    break
    assert ledger.trained_tasks() == [f"t{i}" for i in range(steps * groups)]
    assert ledger.task_fates().settled
    assert ledger.task_fates().total == ledger.task_fates().trained == steps * groups
    fates = ledger.episode_fates()
    assert fates.settled
    assert fates.open == 0


def test_what_a_killed_process_wrote_is_there_for_the_next(tmp_path):
    path = tmp_path / "ledger.sqlite"
    killed = Ledger(path)  # never closed
    killed.admit(0, "t0", 0)
    killed.begin(0, "t0/0")
    with Ledger(path) as ledger:
        assert ledger.rewind(0) == [0]
        assert ledger.next_number() == 1
        ledger.admit(0, "t0", 0)
        ledger.begin(0, "t0/0")
        ledger.trained(0, [0])
        assert ledger.task_fates().trained == 1
        assert (ledger.episode_fates().trained, ledger.episode_fates().cancelled) == (1, 1)
    killed.close()
