"""What `agentrl view` answers, and to whom."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from time import monotonic

import pytest
from fastapi.testclient import TestClient

from agentrl.cluster.worker_registry import WorkerCount
from agentrl.errors import ConfigError
from agentrl.observe.live_status import LiveState, write_live_state
from agentrl.rollout.accounts import SchedulerStatus
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.viewer.folders import RunFolder, find_runs
from agentrl.viewer.server import PageServer, create_page_app


@pytest.fixture
def made(tmp_path):
    run = MadeUpRun(tmp_path / "runs" / "one")
    run.begin()
    run.step()
    return run


@pytest.fixture
def client(made):
    return TestClient(create_page_app([made.folder.parent]), base_url="http://127.0.0.1")


def test_the_page_and_its_parts_are_served_with_a_policy_that_forbids_all_else(client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for part in ("main.js", "style.css", "icon.svg", "theme.js"):
        assert part in page.text or part == "main.js"
        assert client.get(f"/{part}").status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "connect-src 'self';" in policy
    assert "unsafe-eval" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert client.get("/style.css?content=evil").text == client.get("/style.css").text


def light_of(colour):
    """WCAG's relative luminance of #rgb or #rrggbb."""
    digits = colour.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    r, g, b = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_every_colour_of_text_stands_out_from_every_ground_in_light_and_dark(client):
    style = client.get("/style.css").text
    themes = [
        dict(re.findall(r"--(\w+): (#\w+)", block))
        for block in re.findall(r"\{[^{}]*--bg:[^}]*\}", style)
    ]
    assert len(themes) == 3  # light, dark by the system's wish, dark by the key
    for theme in themes:
        for text in ("ink", "soft", "accent", "good", "bad", "warn"):
            for ground in ("bg", "panel", "faint"):
                dark, light = sorted((light_of(theme[text]), light_of(theme[ground])))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground, theme)


def test_a_page_whose_name_was_led_here_is_refused(client):
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/", headers={"Host": "evil.example:8801"}).status_code == 403
    assert client.get("/api/runs", headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.get("/api/runs", headers={"Host": "localhost"}).status_code == 200


def test_with_a_token_only_the_page_itself_is_open(made):
    client = TestClient(create_page_app([made.folder], "secret"), base_url="http://train.example")
    assert client.get("/").status_code == client.get("/main.js").status_code == 200
    for path in (
        "runs",
        "meanings",
        "metrics?run=one",
        "episodes?run=one",
        "events",
        "config?run=one",
    ):
        assert client.get(f"/api/{path}").status_code == 401
        assert (
            client.get(f"/api/{path}", headers={"Authorization": "Bearer guess"}).status_code == 401
        )
    assert client.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_other_machines_need_a_token(made):
    with pytest.raises(ConfigError, match="give a token"):
        PageServer([made.folder], host="0.0.0.0")
    PageServer([made.folder], host="0.0.0.0", token="secret")


def test_nothing_in_a_run_changes_by_being_looked_at(client, made):
    def state():
        files = [
            path for path in made.folder.rglob("*") if path.is_file() and "sqlite-" not in path.name
        ]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    for path in ("metrics", "episodes", "choices", "time", "config"):
        assert client.get(f"/api/{path}?run=one").status_code == 200
    assert client.get("/api/episode?run=one&id=train-000000/0/0").status_code == 200
    assert state() == before
    assert client.post("/api/runs").status_code == 405


def test_metrics_come_from_where_the_page_left_off_and_again_after_a_resume(client, made):
    first = client.get("/api/metrics?run=one").json()
    assert [row["step"] for row in first["rows"]] == [0]
    made.step()
    more = client.get(f"/api/metrics?run=one&after=1&generation={first['generation']}").json()
    assert (more["from"], [row["step"] for row in more["rows"]]) == (1, [1])
    path = made.folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.unlink()
    path.write_text(f'{lines[0]}\n{{"step": 1, "reward": NaN}}\n{{"step": 2, "rew')
    again = client.get(f"/api/metrics?run=one&after=2&generation={first['generation']}").json()
    assert again["from"] == 0
    assert [(row["step"], row["reward"]) for row in again["rows"]][1] == (1, None)


def test_prometheus_reads_the_newest_metrics_of_each_run(client, made):
    from prometheus_client.parser import text_string_to_metric_families

    made.step()
    families = {
        family.name: family
        for family in text_string_to_metric_families(client.get("/metrics").text)
    }
    values = {
        sample.labels["metric"]: sample.value for sample in families["agentrl_metric"].samples
    }
    assert values["entropy"] == 0.5
    assert [(sample.labels, sample.value) for sample in families["agentrl_step"].samples] == [
        ({"run": "one"}, 1.0)
    ]
    assert [sample.value for sample in families["agentrl_live"].samples] == [0.0]
    closed = TestClient(create_page_app([made.folder], "secret"), base_url="http://train.example")
    assert closed.get("/metrics").status_code == 401


def test_what_does_not_exist_is_refused_with_a_reason(client):
    assert (
        client.get("/api/episode?run=one&id=nothing").json()["detail"]
        == "this run has no episode 'nothing'"
    )
    assert client.get("/api/episodes?run=two").json()["detail"] == "there is no run 'two'"
    assert client.get("/api/episodes?run=one&sort=fate;drop").status_code == 400
    assert client.get("/api/episodes?run=one&step=much").status_code == 422
    assert client.get("/../../etc/passwd").status_code == 404


@pytest.mark.parametrize("place", ["", "runs", "runs/one"])
def test_the_page_can_be_open_before_the_first_run_which_is_then_shown_by_itself(tmp_path, place):
    client = TestClient(create_page_app([tmp_path / place]), base_url="http://127.0.0.1")
    assert client.get("/api/runs").json() == []
    assert "No run is in these folders" in client.get("/main.js").text
    run = MadeUpRun(tmp_path / "runs" / "one")
    run.begin()
    run.step()
    limit = monotonic() + 30  # what is found is kept for a moment, however many pages ask
    while not (found := client.get("/api/runs").json()) and monotonic() < limit:
        pass
    assert [one["name"] for one in found] == ["one"]
    assert client.get("/api/episodes?run=one").json()["total"] > 0


def test_a_place_that_is_a_file_is_refused_before_anything_is_served(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0")
    with pytest.raises(
        ConfigError, match=r"there is no folder '.*config.yaml': give the folder of a run"
    ):
        create_page_app([tmp_path / "config.yaml"])


def test_without_duckdb_the_page_is_refused_in_a_sentence_before_anything_is_served(
    made, monkeypatch
):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match="pip install duckdb"):
        create_page_app([made.folder])


def test_runs_are_found_in_folders_and_by_themselves_and_have_names_of_their_own(tmp_path):
    for name in ("a/one", "b/one", "c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("seed: 0")
    found = find_runs([tmp_path, tmp_path / "c"])
    assert sorted(run.name for run in found) == ["a/one", "b/one", "c"]


def test_a_damaged_run_is_shown_as_far_as_it_goes(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: [")
    for name in (
        "metrics.jsonl",
        "status.json",
        "origins.json",
        "summary.json",
        "timeline.jsonl",
        "live.json",
    ):
        (tmp_path / name).write_text('[1]\n{"step": "x"}\n{"st')
    run = RunFolder("run", tmp_path)
    assert (run.settings(), run.origins(), run.metrics(), run.phases()) == ({}, {}, [], [])
    assert run.status()["live"] is False


def test_files_that_cannot_be_read_are_named_and_the_others_shown(client, made):
    made.step()
    for name in (
        "trajectories/step_000001.parquet",
        "samples/step_000000.parquet",
        "ledger.sqlite",
    ):
        path = made.folder / name
        path.unlink()
        path.write_bytes(b"PAR1 and no more" * 9)
    (made.folder / "trajectories" / "step_copy.parquet").write_bytes(b"")
    (made.folder / "trajectories" / "step_000009.parquet").mkdir()
    found = client.get("/api/episodes?run=one&text=next").json()
    assert {(row["step"], row["fate"]) for row in found["rows"]} == {(0, "trained")}
    assert [text.partition(":")[0] for text in found["unreadable"]] == [
        "trajectories/step_000001.parquet",
        "trajectories/step_000009.parquet",
        "ledger.sqlite",
    ]
    assert client.get("/api/episode?run=one&id=train-000000/0/0").json()["trajectory"]["turns"]
    for path in ("choices?", "time?", "gantt?step=1&", "group?task=train-000000&"):
        assert client.get(f"/api/{path}run=one").status_code == 200
    made._done, made._tasks = 1, 5
    (made.folder / "ledger.sqlite").unlink()
    made.step()  # it is written again
    again = client.get("/api/episodes?run=one").json()
    assert {row["step"] for row in again["rows"] if row["kind"]} == {0, 1}
    assert [text.partition(":")[0] for text in again["unreadable"]] == [
        "trajectories/step_000009.parquet"
    ]


def test_times_that_are_none_are_left_out(made):
    with (made.folder / "timeline.jsonl").open("a") as file:
        file.write('{"step": 1, "since": "never", "phase": 3}\n{"step": 2, "since": 5}\n')
    (made.folder / "status.json").write_text('{"pid": 1e9, "since": "yesterday", "step": "x"}')
    run = RunFolder("one", made.folder)
    assert len(run.phases()) == 4
    assert run.status()["since"] is None


def test_a_deleted_run_is_gone_and_its_folder_may_come_back(client, made, monkeypatch):
    monkeypatch.setattr("agentrl.viewer.server._LOOK_SECONDS", 0.0)
    assert client.get("/api/episodes?run=one").status_code == 200
    away = made.folder.rename(made.folder.parents[1] / "away")
    assert client.get("/api/runs").json() == []
    assert client.get("/api/episodes?run=one").json()["detail"] == "there is no run 'one'"
    away.parent.joinpath("runs").rmdir()
    assert client.get("/api/runs").json() == []
    assert client.get("/metrics").status_code == 200
    away.parent.joinpath("runs").mkdir()
    away.rename(made.folder)
    assert [run["name"] for run in client.get("/api/runs").json()] == ["one"]


@pytest.mark.parametrize(
    "odd", ["limit=-1", "limit=100000", "offset=-5", "step=99999999999999999999", "stale=x"]
)
def test_no_page_of_a_table_is_larger_than_a_thousand_rows_or_stands_before_the_first(client, odd):
    assert client.get(f"/api/episodes?run=one&{odd}").status_code == 422


def test_threads_that_read_the_same_metrics_read_each_row_once(made):
    for _ in range(20):
        made.step()
    run = RunFolder("one", made.folder)
    with ThreadPoolExecutor(8) as pool:
        counts = [*pool.map(lambda _: len(run.metrics()), range(64))]
    assert set(counts) == {21}


def test_what_is_known_of_a_run_is_told_with_its_status(made):
    run = RunFolder("one", made.folder)
    assert run.status()["about"] == {
        "began": None,
        "last": run.status()["since"],
        "launches": 0,
        "host": None,
        "commit": None,
        "changed": None,
        "version": None,
        "notes": "",
        "tags": [],
    }
    launches = [
        {"at": f"2027-01-15T0{hour}:00:00+00:00", "host": f"node-{hour}"} for hour in (8, 9)
    ]
    (made.folder / "launches.jsonl").write_text(
        "".join(json.dumps(launch) + "\n" for launch in launches)
    )
    (made.folder / "config.yaml").write_text("observe: {notes: first, tags: [a, 7]}")
    (made.folder / "notes.md").write_text("learned later\n")
    about = run.status()["about"]
    assert (about["began"], about["launches"], about["host"]) == (launches[0]["at"], 2, "node-9")
    assert (about["notes"], about["tags"]) == ("first\n\nlearned later", ["a", "7"])
    (made.folder / "launches.jsonl").write_bytes(b"\xff[]\n5\n")
    (made.folder / "config.yaml").write_text("observe: {notes: [1], tags: {a: 1}}")
    assert (run.status()["about"]["launches"], run.status()["about"]["tags"]) == (0, [])


def test_each_config_that_a_run_has_had_is_told_with_what_it_changed(client, made):
    assert client.get("/api/config?run=one").json()["changes"] == []
    rows = [
        {"config": 0, "step": 0, "at": "2027-01-15T08:00:00+00:00", "changed": {}},
        {
            "config": 1,
            "step": 3,
            "at": "2027-01-15T09:00:00+00:00",
            "changed": {"trainer.lr": [1e-3, 2e-3]},
        },
    ]
    (made.folder / "changes.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '[]\n{"step": 1}\n{"co'
    )
    (made.folder / "config.0.yaml").write_text("trainer: {lr: 1.0e-3}")
    assert client.get("/api/config?run=one").json()["changes"] == rows
    assert client.get("/api/config?run=one&number=0").json()["settings"] == {"trainer.lr": 1e-3}
    assert client.get("/api/config?run=one&number=7").json()["settings"] == {}


def test_a_warning_has_its_step_and_its_metrics_and_is_told_once(made):
    lines = (
        {"step": 3, "text": "a", "metrics": ["x"]},
        {"step": 5, "text": "b"},
        {"step": 9, "text": "a"},
        [],
        {"text": 1},
    )
    (made.folder / "warnings.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"st'
    )
    assert RunFolder("one", made.folder).warnings() == [
        {"step": 3, "text": "a", "metrics": ["x"]},
        {"step": 5, "text": "b", "metrics": []},
    ]


def test_evaluations_and_tools_are_answered(client, made):
    made.evaluate((1.0, 0.0))
    found = client.get("/api/evaluations?run=one&sort=best&descending=true").json()
    assert [task["task"] for task in found["tasks"]] == ["held_out-000000", "held_out-000001"]
    assert (
        client.get("/api/evaluations?run=one&name=x").json()["detail"]
        == "there is no 'x' here, only held_out"
    )
    assert client.get("/api/evaluations?run=one&limit=5000").status_code == 422
    assert client.get("/api/tools?run=one&evaluation=held_out").json()["tools"] == []
    assert client.get("/api/episodes?run=one&evaluation=held_out&step=1").json()["total"] == 2


def test_a_process_that_lives_makes_a_run_live_until_it_has_a_summary(made):
    (made.folder / "status.json").write_text(
        json.dumps({"pid": os.getpid(), "step": 3, "phase": "train"})
    )
    run = RunFolder("one", made.folder)
    assert run.status()["live"] is True
    (made.folder / "summary.json").write_text('{"steps": 4}')
    assert run.status()["live"] is False


def test_a_run_says_what_it_does_now_as_long_as_the_process_that_says_it_lives(made):
    run = RunFolder("one", made.folder)
    assert run.status()["now"] is None  # a run of an earlier release
    state = LiveState(
        os.getpid(),
        5.0,
        (WorkerCount("engine", 1, 2),),
        underway=SchedulerStatus(3, 4, 1, 2, {}, []),
    )
    write_live_state(made.folder / "live.json", state)
    status = run.status()
    assert status["now"] == asdict(state)
    # It starts: the phase is that of another process.
    assert (status["live"], status["phase"]) == (
        True,
        None,
    )
    assert run.phases()[-1]["end"] is not None
    # Of the part before it was resumed with more steps.
    (made.folder / "summary.json").write_text('{"steps": 4}')
    (made.folder / "status.json").write_text(
        json.dumps({"pid": os.getpid(), "step": 3, "phase": "train"})
    )
    status = run.status()
    assert (status["live"], status["phase"], status["now"]) == (True, "train", asdict(state))
    write_live_state(made.folder / "live.json", replace(state, pid=ended_process()))
    assert (run.status()["live"], run.status()["now"]) == (False, None)


def ended_process() -> int:
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid
