"""Episodes for other programs, and again in the terminal."""

import errno
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.viewer import episode_export
from agentrl.viewer.episode_export import atif_of, export_episodes


@pytest.fixture
def made(tmp_path):
    run = MadeUpRun(tmp_path / "run", groups=2, members=2)
    run.begin()
    for _ in range(2):
        run.step()
    return run


CALLED = {
    "row": {
        "id": "t/0/0",
        "agent": "",
        "env": "shop",
        "status": "terminated",
        "success": True,
        "score": 1,
        "step": 3,
    },
    "trajectory": {
        "seed": 1,
        "parts": '{"environment": 1.0}',
        "messages": [
            {
                "role": "user",
                "content": "Buy tea.",
                "reasoning": "",
                "tool_calls": "",
                "tool_call_id": "",
            },
            {
                "role": "assistant",
                "content": "Yes.\n<tool_call>\n"
                '{"name": "buy", "arguments": {"what": "tea"}}\n</tool_call>',
                "reasoning": "Tea it is.",
                "tool_calls": '[{"name": "buy", "arguments": {"what": "tea"}, "id": ""}]',
                "tool_call_id": "",
            },
            {
                "role": "tool",
                "content": "bought",
                "reasoning": "",
                "tool_calls": "",
                "tool_call_id": "unknown",
            },
        ],
        "turns": [
            {
                "prompt_ids": [1, 2],
                "token_ids": [3],
                "logprobs": [-0.5],
                "policy_versions": [3],
                "reward": 1.0,
                "forked": False,
                "asked": 1_800_000_000.0,
            },
        ],
    },
    "samples": [{"sample": 7}],
    "fate": "t/0/0 was trained at step 3 as sample 7 of 8",
}


def test_a_tools_result_belongs_to_the_step_that_called_it():
    first, second = atif_of(CALLED, "run", "tiny")["steps"]
    assert (first["source"], first["message"]) == ("user", "Buy tea.")
    assert (second["message"], second["reasoning_content"]) == ("Yes.", "Tea it is.")
    (call,) = second["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("buy", {"what": "tea"})
    assert second["observation"]["results"] == [
        {"content": "bought", "source_call_id": call["tool_call_id"]}
    ]
    assert second["timestamp"] == "2027-01-15T08:00:00+00:00"


def test_each_answer_has_its_whole_prompt_and_a_fork_begins_it_again(made, tmp_path):
    assert export_episodes(made.folder, tmp_path / "atif", None) == 8
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "atif").iterdir()}
    forked = next(one for one in found.values() if one["trajectory_id"].endswith("/0/0"))
    answers = [step for step in forked["steps"] if step["source"] == "agent"]
    ids = [answer["metrics"]["prompt_token_ids"] for answer in answers]
    assert ids[0] == ids[1] == [1, 2, 3, 4]
    assert ids[2] == [1, 2, 3, 4, *answers[1]["metrics"]["completion_token_ids"], 1, 2, 3, 4]
    assert [step["step_id"] for step in forked["steps"]] == list(range(1, 8))
    assert forked["extra"]["fate"].startswith(forked["trajectory_id"])


def test_json_lines_have_all_that_is_known_and_a_step_can_be_chosen(made, tmp_path):
    assert export_episodes(made.folder, tmp_path / "made" / "all.jsonl", 1) == 4
    lines = [
        json.loads(line) for line in (tmp_path / "made" / "all.jsonl").read_text().splitlines()
    ]
    assert {line["row"]["step"] for line in lines} == {1}
    assert all(len(line["trajectory"]["turns"]) == 3 for line in lines)


def test_a_data_set_has_a_row_of_messages_for_each_episode(made, tmp_path):
    import pyarrow.parquet as pq

    assert export_episodes(made.folder, tmp_path / "new" / "all.parquet", None) == 8
    rows = pq.read_table(tmp_path / "new" / "all.parquet").to_pylist()
    assert len({row["id"] for row in rows}) == 8
    first = rows[0]
    assert [message["role"] for message in first["messages"]] == [
        "system",
        *["user", "assistant"] * 3,
    ]
    assert json.loads(first["parts"]) == {"environment": first["score"]}
    assert first["fate"].startswith(f"{first['id']} was trained at step {first['step']}")


def test_datasets_loads_it(made, tmp_path):
    import datasets

    export_episodes(made.folder, tmp_path / "all.parquet", None)
    cache = str(tmp_path / "cache")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "all.parquet"), cache_dir=cache
    )
    assert loaded["train"][0]["messages"][0]["content"] == "Continue."


def test_nothing_is_overwritten_and_nothing_is_left_of_an_empty_export(made, tmp_path):
    with pytest.raises(ConfigError, match="is there already"):
        export_episodes(made.folder, tmp_path, None)
    with pytest.raises(ConfigError, match="no episode in a batch of step 9"):
        export_episodes(made.folder, tmp_path / "none.jsonl", 9)
    with pytest.raises(ConfigError, match="no episode in a batch of step 9"):
        export_episodes(made.folder, tmp_path / "none.parquet", 9)
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_export_that_fails_leaves_nothing(made, tmp_path, monkeypatch, suffix):
    def fails(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(episode_export, "finite" if suffix == ".jsonl" else "_name_images", fails)
    before = set(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        export_episodes(made.folder, tmp_path / f"all{suffix}", None)
    assert set(tmp_path.iterdir()) == before


def test_an_episode_is_played_again_without_commands_for_the_terminal(tmp_path, agentrl):
    run = MadeUpRun(tmp_path / "run", texts=("\x1b]0;owned\x07 [red]not red[/red]",))
    run.begin()
    run.step()
    done = agentrl("replay", str(run.folder), "train-000001/2/0", "--speed", "0")
    assert done.returncode == 0, done.stderr
    assert "\x1b]0" not in done.stdout
    assert "[red]not red[/red]" in done.stdout
    assert "was trained at step 0 as sample" in " ".join(done.stdout.split())
    failed = agentrl("replay", str(run.folder), "train-000004/0/0")
    assert failed.returncode == 2
    assert "only the fate of train-000004/0/0 was kept" in failed.stderr


def test_without_an_episode_the_newest_ones_are_listed_and_a_tasks_id_leads_to_its_episodes(
    tmp_path, agentrl
):
    run = MadeUpRun(tmp_path / "run", groups=2, members=3)
    run.begin()
    assert "no episode in a batch yet" in agentrl("replay", str(run.folder)).stderr
    run.step()
    run.step()
    listed = agentrl("replay", str(run.folder))
    assert listed.returncode == 0
    first = listed.stdout.splitlines()[1].split()[0]
    assert f"agentrl replay {run.folder} {first}" in listed.stdout
    assert "the newest of 12 episodes in batches" in listed.stdout
    assert agentrl("replay", str(run.folder), first, "--speed", "0").returncode == 0
    failed = agentrl("replay", str(run.folder), first.partition("/")[0])
    assert (
        failed.returncode,
        f"the episodes of that task are {first.partition('/')[0]}/0/0" in failed.stderr,
    ) == (
        2,
        True,
    )


def test_a_folder_with_the_name_of_a_file_is_refused(made, tmp_path):
    with pytest.raises(ConfigError, match=r"episodes\.jsonl"):
        export_episodes(made.folder, tmp_path / "episodes.json", None)


@pytest.mark.long
def test_harbors_own_models_accept_what_is_exported(made, tmp_path, monkeypatch):
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--python-version",
        "3.12",
    ]
    subprocess.run(
        [*command, "--only-binary=:all:", "harbor", "-d", str(tmp_path / "wheel")], check=True
    )
    (wheel,) = (tmp_path / "wheel").glob("harbor-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        models = [
            name for name in archive.namelist() if name.startswith("harbor/models/trajectories/")
        ]
        archive.extractall(tmp_path / "harbor", models)
    monkeypatch.syspath_prepend(str(tmp_path / "harbor"))
    from harbor.models.trajectories import Trajectory

    export_episodes(made.folder, tmp_path / "atif", None)
    documents = [json.loads(Path(path).read_text()) for path in (tmp_path / "atif").iterdir()]
    for document in [*documents, atif_of(CALLED, "run", "tiny")]:
        assert Trajectory.model_validate(document).to_json_dict()["steps"]
