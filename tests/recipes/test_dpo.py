"""The recipe dpo: conversations become the tokens that a model would have read and written, and
pairs are learned.
"""

import json
from pathlib import Path

import pytest

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.models.tiny import create_tiny_model
from agentrl.recipes.written_conversation import trajectory_from_messages
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Message
from tests.commands import Command

RENDERER = TemplateRenderer(ByteTokenizer())


def test_a_conversation_is_laid_out_as_it_would_have_been_played() -> None:
    said = [
        Message("system", "Be kind."),
        Message("user", "Hi"),
        Message("assistant", "Hello"),
        Message("user", "Bye"),
    ]
    trajectory = trajectory_from_messages([*said, Message("assistant", "See you")], RENDERER)
    assert len(trajectory.turns) == 2
    whole = [
        t
        for turn in trajectory.turns
        for t in (*turn.prompt_ids.tolist(), *turn.completion.token_ids.tolist())
    ]
    text = RENDERER.decode(trajectory.turns[1].prompt_ids)
    assert "Bye" in text
    assert "Hello" not in text
    assert whole[: len(trajectory.turns[0].prompt_ids)] == trajectory.turns[0].prompt_ids.tolist()
    with pytest.raises(ConfigError, match="answer of the assistant to nothing"):
        trajectory_from_messages([Message("assistant", "Hello")], RENDERER)
    with pytest.raises(ConfigError, match="no answer of the assistant"):
        trajectory_from_messages(said[:2], RENDERER)


@pytest.mark.long
def test_what_is_chosen_becomes_likelier_and_what_is_rejected_less(tmp_path: Path) -> None:
    create_tiny_model(tmp_path / "model", corpus=["Which way? left right up down"])
    rows = [{"prompt": f"Which way? {n}", "chosen": "left", "rejected": "right"} for n in range(24)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "dpo.yaml").write_text("""
env: guess_number
model: model
recipe:
  name: dpo
  preferences: {path: pairs.jsonl, epochs: 3, pairs_per_step: 8, held_out: 0.25, lr: 2.0e-3}
trainer: {device: cpu}
trackers: []
run_dir: run
""")
    command = Command("train", "dpo.yaml", cwd=tmp_path, log=tmp_path / "run.log")
    assert command.wait(300) == 0, command.output
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if "preference_loss" in row]
    assert len(steps) == 9  # 18 pairs, 8 at a time, three times
    # Both are as likely as at first.
    assert steps[0]["preference_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1]["preference_loss"] < 0.5 * steps[0]["preference_loss"]
    assert steps[-1]["accuracy"] == rows[-1]["eval/preference_accuracy"] == 1
    assert (tmp_path / "run" / "dpo" / "model.safetensors").is_file()
