"""Rollouts of verifiers and training traces of OpenEnv: read, written, and held against their own
code.
"""

import asyncio
import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from math import isnan
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from agentrl.conversation.config import RendererConfig
from agentrl.conversation.family import find_family
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.qa import QuestionAnswer
from agentrl.errors import ConfigError
from agentrl.hosting.interpreter import environment, find_interpreter
from agentrl.recipes.foreign_recordings import read_foreign_recordings
from agentrl.recipes.recordings import RecordingsConfig, read_recordings, recorded
from agentrl.recipes.written_conversation import trajectory_from_messages
from agentrl.tasks.row_reader import RowReader, RowSettings
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Message, ToolCall, Trajectory
from agentrl.viewer.episode_export import export_episodes
from tests.chat_templates import tokenizer_of

RENDERER = TemplateRenderer(ByteTokenizer())
ROLLOUT: dict[str, Any] = {
    "example_id": 7,
    "prompt": [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "given two"},
        {"role": "user", "content": "2 + 3?"},
    ],
    "completion": [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                json.dumps({"id": "c1", "name": "add", "arguments": '{"a": 2, "b": 3}'})
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "assistant", "content": "five"},
    ],
    "reward": 0.5,
    "error": None,
    "is_truncated": False,
    "tool_defs": [{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}],
}
FAILED = {**ROLLOUT, "completion": None, "reward": 0.0, "error": {"error": "SandboxError"}}
TURN: dict[str, Any] = {
    "node_id": "a",
    "prompt_token_ids": [1, 2],
    "completion_token_ids": [3, 4, 5],
    "per_token_logps": [-0.5, -0.25, 0.0],
    "loss_mask": [0, 0, 1, 0, 1],
}


def written(folder: Path, *rows: Mapping[str, Any] | str, name: str = "results.jsonl") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def imitated(path: Path, least: float | None = None) -> list[Trajectory]:
    return asyncio.run(recorded(RecordingsConfig(path=path, least_score=least), RENDERER))


def test_a_rollout_of_verifiers_becomes_the_tokens_that_the_model_would_have_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {**ROLLOUT, "reward": 0.0}
    (tmp_path / "metadata.json").write_text("{}")  # verifiers writes one beside them
    written(tmp_path, ROLLOUT, FAILED, {**bad, "is_truncated": True})
    first, second = imitated(tmp_path)
    assert "1 rollouts that failed are left out" in caplog.text
    asked = RENDERER.decode(first.turns[0].prompt_ids)
    assert all(text in asked for text in ("Adds.", "given two", "2 + 3?"))
    called, said = (RENDERER.read(t.prompt_ids, t.completion.token_ids, ()) for t in first.turns)
    assert called.action.startswith("Let me see.\n<tool_call>\n")
    assert '"arguments": {"a": 2, "b": 3}' in called.action
    assert said.action == "five"
    assert "5" in RENDERER.decode(first.turns[1].prompt_ids)
    cut, whole = second.turns[-1].completion, first.turns[-1].completion
    assert cut.finish_reason == "length"
    assert cut.token_ids.tolist() == whole.token_ids.tolist()[: len("five")]
    assert whole.token_ids[-1] in RENDERER.stop_token_ids
    assert [one.id for one in imitated(tmp_path, 0.5)] == ["results.jsonl, line 1"]


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (
            "qwen3_5_think",
            "Hm.\n</think>\n\nSee.\n\n<tool_call>\n<function=add>\n<parameter=a>\n2\n",
        ),
        (
            "gemma4",
            "<|channel>thought\nHm.\n<channel|>\n\nSee.<|tool_call>call:add{a:2}<tool_call|>",
        ),
        ("llama3_1", 'See.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}'),  # no room before
    ],
)
def test_reasoning_and_calls_are_written_as_the_models_template_writes_them(
    template: str, call: str
) -> None:
    tokenizer = tokenizer_of(template)
    one = TemplateRenderer(tokenizer, RendererConfig(), family=find_family(tokenizer, {}, {}))
    add = ToolCall("add", {"a": 2}, "c1")
    talk = (
        Message("user", "2?"),
        Message("assistant", f"See.\n{add.render()}", "Hm.", (add,)),
        Message("tool", "2", tool_call_id="c1", name="add"),
        Message("assistant", "two"),
    )
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    first, last = trajectory_from_messages(
        talk, one, [{"type": "function", "function": function}]
    ).turns
    assert one.decode(first.completion.token_ids).startswith(call)
    read = one.read(last.prompt_ids, last.completion.token_ids, ())
    assert (read.reasoning, read.content) == ("", "two")


def test_a_trace_of_openenv_keeps_its_tokens_and_learns_what_its_masks_say(tmp_path: Path) -> None:
    follows = {
        **TURN,
        "node_id": "b",
        "prompt_token_ids": [1, 2, 3, 4, 5, 6],
        "completion_token_ids": [7, 8],
        "per_token_logps": [-1.0, -2.0],
        "loss_mask": [0] * 6 + [1, 0],
        "metadata": {"reward": 0.25},
    }
    forks = {**TURN, "node_id": "c", "prompt_token_ids": [9], "loss_mask": [0, 1, 1, 1]}
    path = written(tmp_path, {"turns": [TURN, follows, forks]}, {"turns": [TURN]}, name="t.jsonl")
    (one, score), (_, unknown) = read_foreign_recordings([path], RENDERER)
    assert [
        (turn.prompt_ids.tolist(), turn.completion.token_ids.tolist(), turn.forked)
        for turn in one.turns
    ] == [
        ([1, 2], [3], False),
        ([4], [5], False),
        ([6], [7], False),
        ([9], [3, 4, 5], True),
    ]
    assert one.turns[2].completion.logprobs.tolist() == [-1.0]
    assert score == 0.25
    assert isnan(unknown)
    single = tmp_path / "one.json"
    single.write_text(json.dumps({"schema_version": 1, "turns": [TURN]}, indent=1))
    assert len(imitated(single)) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ({"question": "?"}, "neither prompt and completion, .* but question"),
        ({**ROLLOUT, "reward": "1"}, "reward is '1': write a number"),
        ({**ROLLOUT, "completion": [{"role": "robot", "content": ""}]}, "completion: .*'robot'"),
        ({**ROLLOUT, "completion": ROLLOUT["prompt"][:2]}, "no answer of the assistant"),
        ({**ROLLOUT, "tool_defs": [1]}, "tool_defs has 1"),
        ({"schema_version": 2, "turns": []}, "schema_version: Input should be 1"),
        ({"turns": [{**TURN, "prompt_token_ids": ["1"]}]}, "turns.0.prompt_token_ids.0: .*integer"),
        ({"turns": [TURN, TURN]}, "the same node_id"),
        ({"turns": [{**TURN, "per_token_logps": [0.0]}]}, "3 sampled tokens and 1 logprobs"),
        ({"turns": [{**TURN, "loss_mask": [1]}]}, "has 1 entries"),
        ({"turns": [{**TURN, "loss_mask": [1, 0, 1, 1, 1]}]}, "trains on tokens of the prompt"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(
    tmp_path: Path, line: Mapping[str, Any] | str, said: str
) -> None:
    path = written(tmp_path, ROLLOUT, line)
    with pytest.raises(ConfigError, match=rf"results\.jsonl, line 2: .*{said}"):
        imitated(path)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    run = MadeUpRun(tmp_path / "run", groups=2, members=2, tools=("look",))
    run.begin()
    run.step()
    return run.folder


def test_what_is_exported_is_read_again(made: Path, tmp_path: Path) -> None:
    before = {one.trajectory.id: one for one in read_recordings(made / "trajectories")}
    lines: dict[str, list[dict[str, Any]]] = {}
    back: dict[str, list[tuple[Trajectory, float]]] = {}
    for layout in ("verifiers", "openenv"):
        path = tmp_path / layout / "results.jsonl"
        assert export_episodes(made, path, None, layout) == 4
        lines[layout] = [json.loads(line) for line in path.read_text().splitlines()]
        back[layout] = read_foreign_recordings([path], RENDERER)
    for trace, (one, score) in zip(lines["openenv"], back["openenv"], strict=True):
        known = before[trace["turns"][-1]["metadata"]["id"]]
        assert score == known.score
        for turn, old in zip(one.turns, known.trajectory.turns, strict=True):
            kept = replace(old.completion, policy_versions=turn.completion.policy_versions)
            assert (turn.prompt_ids.tolist(), turn.forked) == (old.prompt_ids.tolist(), old.forked)
            assert turn.completion == kept
    for rollout, (one, score) in zip(lines["verifiers"], back["verifiers"], strict=True):
        known = before[rollout["info"]["id"]]
        assert (rollout["metrics"], score) == ({"environment": known.score}, known.score)
        assert [(m.role, m.said, [c.name for c in m.tool_calls]) for m in one.messages] == [
            (m.role, m.said, [c.name for c in m.tool_calls]) for m in known.trajectory.messages
        ]
    assert [rollout["example_id"] for rollout in lines["verifiers"]] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match=r"name a new file that ends in \.jsonl"):
        export_episodes(made, tmp_path / "folder", None, "openenv")


def test_rollouts_and_traces_are_tasks_by_their_columns() -> None:
    asked = {**TURN, "request": {"messages": ROLLOUT["prompt"]}}
    for row, columns in (
        ({**ROLLOUT, "answer": "5"}, {"prompt": "prompt", "answer": "answer"}),
        ({"turns": [asked]}, {"prompt": "turns.0.request.messages"}),
    ):
        options = RowReader(RowSettings(columns=columns), QuestionAnswer.Options).read(row).options
        assert options["prompt"] == ROLLOUT["prompt"]
        assert options.get("answer") == row.get("answer")


@pytest.mark.slow
def test_openenvs_own_model_accepts_what_is_exported(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    wheels = tmp_path / "wheel"
    subprocess.run([*download, "openenv==0.10.0", "-d", str(wheels)], check=True)
    (wheel,) = wheels.glob("openenv-*.whl")
    core = "openenv/core/harness/"
    with zipfile.ZipFile(wheel) as archive:  # these modules alone: the package needs a lot more
        archive.extractall(
            tmp_path / "openenv", [f"{core}training.py", f"{core}capture/validate.py"]
        )
    monkeypatch.syspath_prepend(str(tmp_path / "openenv"))
    from openenv.core.harness.training import TrainingTrace  # type: ignore[import-not-found]

    export_episodes(made, tmp_path / "traces.jsonl", None, "openenv")
    traces = [
        TrainingTrace.model_validate_json(line)
        for line in (tmp_path / "traces.jsonl").read_text().splitlines()
    ]
    assert [len(trace.turns) for trace in traces] == [3] * 4
    (tmp_path / "theirs.json").write_text(traces[0].model_dump_json(indent=1))
    ((back, score),) = read_foreign_recordings([tmp_path / "theirs.json"], RENDERER)
    assert [turn.completion.token_ids.tolist() for turn in back.turns] == [
        turn.completion_token_ids for turn in traces[0].turns
    ]
    assert score == traces[0].turns[-1].metadata["reward"]


THEIRS = '''
    """verifiers' own code saves a rollout, and loads ours."""
    import json, sys
    from pathlib import Path
    import verifiers as vf
    from verifiers.types import RolloutTiming
    from verifiers.utils.save_utils import load_outputs, save_outputs, state_to_output
    from datasets import Dataset

    call = vf.ToolCall(id="c1", name="add", arguments='{"a": 2, "b": 3}')
    said = [
        vf.AssistantMessage(content="Let me see.", tool_calls=[call]),
        vf.ToolMessage(tool_call_id="c1", content="5"), vf.AssistantMessage(content="five"),
    ]
    tool = vf.Tool(name="add", description="Adds.", parameters={"type": "object"})
    state = vf.State(
        example_id=7, prompt=[vf.UserMessage(content="2 + 3?")], completion=said, answer="5",
        reward=0.5, metrics={"right": 0.5}, timing=RolloutTiming(), tool_defs=[tool],
        is_completed=True, is_truncated=False, stop_condition="done", trajectory=[],
    )
    save_outputs([state_to_output(state)], Path(sys.argv[1]))
    ours = load_outputs(Path(sys.argv[2]))
    rows = Dataset.from_list([dict(one) for one in ours])
    print(json.dumps([rows.num_rows, [one["example_id"] for one in ours]]))
'''


@pytest.mark.long
def test_verifiers_own_code_loads_what_is_exported_and_its_rollouts_are_read(
    made: Path, tmp_path: Path
) -> None:
    python = find_interpreter(None, ["verifiers==0.3.0"])
    export_episodes(made, tmp_path / "ours" / "results.jsonl", None, "verifiers")
    (tmp_path / "theirs.py").write_text(dedent(THEIRS))
    done = subprocess.run(
        [python, "theirs.py", "theirs", "ours"],
        cwd=tmp_path,
        env=environment(python),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [4, [0, 0, 1, 1]]
    (one,) = imitated(tmp_path / "theirs", 0.5)
    called, said = (RENDERER.read(t.prompt_ids, t.completion.token_ids, ()) for t in one.turns)
    assert '"arguments": {"a": 2, "b": 3}' in called.action
    assert said.action == "five"
    assert "Adds." in RENDERER.decode(one.turns[0].prompt_ids)
