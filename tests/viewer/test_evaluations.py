"""Held-out tasks over all evaluations, and the episodes of these in the index."""

import pytest

from agentrl.errors import ConfigError
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import EpisodeIndex, EpisodeQuery
from agentrl.viewer.evaluations import TaskQuery, evaluations
from agentrl.viewer.folders import RunFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> RunFolder:
    """Three evaluations of four tasks, between steps, and one of a suite."""
    run = MadeUpRun(tmp_path_factory.mktemp("runs") / "run", texts=("A door.",))
    run.begin()
    for scores in ((0.0, 1.0, 0.5, 0.0), (0.5, 0.0, 1.0, None), (1.0, 0.0, 0.5, 0.0)):
        run.evaluate(scores)
        run.step()
    run.evaluate((0.25, 0.75), "hard")
    return RunFolder("run", run.folder)


def asked(folder: RunFolder, **query) -> dict:
    names = {name: list(files) for name, files in folder.evaluations().items()}
    return evaluations(EpisodeIndex(folder), names, TaskQuery(**query))


def test_a_task_has_its_best_its_worst_and_the_first_evaluation_that_solved_it(folder):
    found = asked(folder)
    assert found["names"] == [["held_out", [0, 1, 2]], ["hard", [3]]]
    tasks = {task["task"]: task for task in found["tasks"]}
    assert [
        (task["first"], task["best"], task["worst"], task["last"], task["change"])
        for task in tasks.values()
    ] == [
        (1, (1.0, 2), (0.0, 0), 1.0, 1.0),
        (0, (1.0, 0), (0.0, 1), 0.0, -1.0),
        (0, (1.0, 1), (0.5, 0), 0.5, 0.0),
        (None, (0.0, 0), (0.0, 0), 0.0, 0.0),
    ]
    assert tasks["held_out-000003"]["cells"] == [
        [0.0, 0.0, 1, 0, "held_out-000003"],
        [None, None, 1, 1, "held_out-000003"],
        [0.0, 0.0, 1, 0, "held_out-000003"],
    ]
    assert [
        (one["solved"], one["failed"], one["success"], one["score"]) for one in found["columns"]
    ] == [
        (2, 0, 0.5, 0.375),
        (2, 1, pytest.approx(2 / 3), 0.5),
        (2, 0, 0.5, 0.375),
    ]
    assert found["counts"] == {"all": 4, "lost": 1, "never": 1, "gained": 1, "always": 1}


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ({"sort": "first"}, [1, 2, 0, 3]),
        ({"sort": "first", "descending": True}, [0, 1, 2, 3]),
        ({"sort": "change"}, [1, 2, 3, 0]),
        ({"sort": "last", "descending": True}, [0, 2, 1, 3]),
        ({"show": "lost"}, [1]),
        ({"show": "never"}, [3]),
        ({"text": "000002"}, [2]),
        ({"offset": 1, "limit": 2}, [1, 2]),
    ],
)
def test_tasks_are_ordered_chosen_and_come_in_pages(folder, query, numbers):
    assert [int(task["task"][-6:]) for task in asked(folder, **query)["tasks"]] == numbers


def test_the_samples_of_a_suites_task_are_one_task(folder):
    found = asked(folder, name="hard")
    assert [(task["task"], task["last"], task["cells"][0][4]) for task in found["tasks"]] == [
        ("hard-000000", 0.25, "hard-000000/0"),
        ("hard-000001", 0.75, "hard-000001/0"),
    ]


@pytest.mark.parametrize(
    ("query", "wrong"), [({"name": "easy"}, "easy"), ({"sort": "id"}, "id"), ({"show": "x"}, "x")]
)
def test_what_there_is_not_is_refused_with_what_there_is(folder, query, wrong):
    with pytest.raises(ConfigError, match=f"there is no '{wrong}' here, only "):
        asked(folder, **query)


def test_a_run_without_evaluations_has_none(tmp_path):
    run = MadeUpRun(tmp_path / "run")
    run.begin()
    run.step()
    assert asked(RunFolder("run", run.folder))["names"] == []


def test_episodes_of_evaluations_are_listed_apart_and_searched_and_read(folder):
    index = EpisodeIndex(folder)
    assert index.page(EpisodeQuery(limit=1))["total"] == 3 * 17
    assert index.page(EpisodeQuery(evaluation="held_out"))["total"] == 12
    assert index.choices()["evaluation"] == [["held_out", 12], ["hard", 2]]
    assert index.choices("held_out")["fate"] == [["held_out", 11], ["failed", 1]]
    (failed,) = index.page(EpisodeQuery(evaluation="held_out", fate="failed"))["rows"]
    assert (failed["id"], failed["step"], failed["why"], failed["score"]) == (
        "held_out-000003",
        1,
        "A door.",
        None,
    )
    assert index.page(EpisodeQuery(evaluation="held_out", step=1, text="door"))["total"] == 4
    assert index.page(EpisodeQuery(text="door", step=1))["total"] == 16
    assert all(row["evaluation"] is None for row in index.in_play(0, 1e12))
    episode = EpisodeReader(folder, index).episode("held_out-000001", step=0)
    assert (episode["row"]["score"], episode["trajectory"]["messages"][1]["content"]) == (
        1.0,
        "A door.",
    )
    assert (
        episode["fate"]
        == "held_out-000001 was played to evaluate the weights after 0 steps on the held-out tasks;"
        " nothing trains on it. 1 of 3 evaluations solved it, first after 0 steps."
    )
    assert [(one["step"], one["score"]) for one in episode["others"]] == [
        (0, 1.0),
        (1, 0.0),
        (2, 0.0),
    ]
    assert len(EpisodeReader(folder, index).group("held_out-000001")["members"]) == 3
