"""`agentrl tasks`: what a model will see, and what a reward pays, before a run."""

import json
from pathlib import Path
from typing import Any

import pytest

SOLUTION = "She has 2 + 2 = <<2+2=4>>4.\n#### 4"
COLUMNS = "tasks.columns={prompt: question, answer: answer}"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def gsm8k(tmp_path: Path) -> str:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"question": "2 + 2?", "answer": SOLUTION}) + "\n")
    return str(path)


def test_a_file_of_other_columns_is_refused_with_the_setting_to_write(
    agentrl: Any, gsm8k: str
) -> None:
    done = agentrl("tasks", gsm8k)
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith(f"the columns are question, answer: write {COLUMNS}")


def test_tasks_are_shown_with_their_place_and_what_is_paid(agentrl: Any, gsm8k: str) -> None:
    done = agentrl(
        "tasks", gsm8k, COLUMNS, "reward=numeric", "--answer", "It is 4.", "--answer", "5"
    )
    assert done.returncode == 0
    for text in (
        "line 1",
        "user 2 + 2?",
        "#### 4",
        'the answer "It is 4.": 1 (numeric 1), success',
        "tasks: 1, of qa",
    ):
        assert text in done.stdout
    assert 'the answer "5": 0 (numeric 0), no success' in done.stdout
    assert (
        'its right answer "4": 1 (exact 1), success'
        in agentrl("tasks", gsm8k, COLUMNS, "reward=exact", 'tasks.answer="4"').stdout
    )


def test_a_reward_that_would_pay_nothing_is_said_and_the_tasks_are_shown_nevertheless(
    agentrl: Any, gsm8k: str
) -> None:
    done = agentrl("tasks", gsm8k, COLUMNS)
    assert done.returncode == 1
    assert "user 2 + 2?" in done.stdout
    assert "a run would not start: tasks of qa, with the reward environment" in done.stdout
    assert "which would pay nothing: write 'tasks.answer=" in done.stdout


def test_the_prompt_is_shown_as_the_template_of_a_model_writes_it_with_its_tokens(
    agentrl: Any, tmp_path: Path, tiny_model_dir: Path
) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": chat, "answer": "4"}) + "\n")
    done = agentrl("tasks", str(tmp_path / "chats.jsonl"), "--model", str(tiny_model_dir))
    assert done.returncode == 0
    from agentrl.conversation.chats import read_chat
    from agentrl.conversation.renderer import TemplateRenderer

    renderer = TemplateRenderer.of_model(tiny_model_dir)
    ids = renderer.whole(read_chat(chat), ())
    assert renderer.decode(ids).strip() in done.stdout
    assert f"\n{len(ids)} tokens\n" in done.stdout
    assert (
        f"prompts of the first 1 tasks: {len(ids)} tokens (median), {len(ids)} at most"
        in done.stdout
    )


def test_tasks_of_a_config_are_those_of_its_environment(agentrl: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("env: guess_number\nmodel: tiny\n")
    done = agentrl("tasks", str(tmp_path / "run.yaml"), "--show", "1", "--held-out")
    assert done.returncode == 0
    for text in ("held-out-000000", "seed ", "system ", "tasks without end, of guess_number"):
        assert text in done.stdout
