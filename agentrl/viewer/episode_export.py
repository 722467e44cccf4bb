"""Episodes of a run for other programs: as ATIF, the interchange format of Harbor, as JSON lines,
as a data set, as rollouts of verifiers, or as training traces of OpenEnv.

ATIF is the Agent Trajectory Interchange Format (RFC 0001 of
https://github.com/laude-institute/harbor), version 1.7.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import ConfigError
from agentrl.files.durable import none_unfinished, unfinished, write_whole
from agentrl.observe.run_images import named_images
from agentrl.package.distribution import installed_version
from agentrl.trajectory import Message
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import KINDS, EpisodeIndex, EpisodeQuery
from agentrl.viewer.exported_lines import Layout, lines_of, linked_messages, with_prompts
from agentrl.viewer.folders import RunFolder
from agentrl.viewer.numbers import finite

_AT_ONCE = 500
_FILES = (".json", ".csv", ".gz")
"""Endings of names that are not meant for folders."""


def export_episodes(
    folder: Path, into: Path, step: int | None, layout: Layout | None = None
) -> int:
    """Write the trained episodes of a run, or of one step; returns how many.

    Into a file that ends in `.jsonl`: a line for each, with all that is known of it. Into one that
    ends in `.parquet`: a row for each, as data sets of conversations have them. Into a new folder:
    a file of ATIF for each. `layout`: what each line of a `.jsonl` file is, if not all that is
    known.

    Raises:
        ConfigError: the folder or the file is there already, a folder has the name of a file, there
        is no episode, or one cannot be written in this layout.
    """
    if into.exists():
        raise ConfigError(
            f"{into} is there already: name a new folder (for ATIF), or a new file that ends in"
            " .jsonl or .parquet"
        )
    if into.suffix in _FILES:
        raise ConfigError(
            f"{into} would be a folder: name one without {into.suffix} (for ATIF), or"
            f" {into.stem}.jsonl or .parquet"
        )
    if layout is not None and into.suffix != ".jsonl":
        raise ConfigError(
            f"{into} is no file of lines, which the format {layout} is written to: name a new file"
            " that ends in .jsonl"
        )
    run = RunFolder(folder.name, folder)
    index = EpisodeIndex(run)
    found = _episodes(EpisodeReader(run, index), index, step)
    count = 0
    if into.suffix == ".parquet":
        count = _write_dataset(into, found)
    elif into.suffix == ".jsonl":
        into.parent.mkdir(parents=True, exist_ok=True)
        with none_unfinished(into), unfinished(into).open("w") as file:
            for line in found if layout is None else lines_of(found, layout):
                file.write(json.dumps(finite(line), allow_nan=False) + "\n")
                count += 1
        if count:
            unfinished(into).replace(into)
        else:
            unfinished(into).unlink()
    else:
        model = str(run.settings().get("model.name", "")) or None
        for episode in found:
            name = "_".join(filter(None, (episode["row"]["id"], episode["row"]["agent"]))).replace(
                "/", "_"
            )
            into.mkdir(parents=True, exist_ok=True)
            file_name = f"step_{episode['row']['step']:06d}_{name}.json"
            write_whole(
                into / file_name, json.dumps(finite(atif_of(episode, run.name, model)), indent=1)
            )
            count += 1
    if not count:
        raise ConfigError(
            f"{folder} has no episode in a batch" + ("" if step is None else f" of step {step}")
        )
    return count


DATASET_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("agent", pa.string()),
        ("env", pa.string()),
        ("seed", pa.int64()),
        ("step", pa.int32()),
        ("status", pa.string()),
        ("success", pa.bool_()),
        ("score", pa.float64()),
        ("parts", pa.string()),
        ("words", pa.string()),
        (
            "messages",
            pa.list_(
                pa.struct(
                    [("role", pa.string()), ("content", pa.string()), ("reasoning", pa.string())]
                )
            ),
        ),
        ("fate", pa.string()),
    ]
)
"""An episode as a row of a data set: `messages` in the form that trainers of conversations read;
`parts` and `words` (what judges said) are JSON."""


_OF_TRAJECTORY = ("seed", "parts", "words", "messages")


def _write_dataset(into: Path, episodes: Iterator[dict[str, Any]]) -> int:
    into.parent.mkdir(parents=True, exist_ok=True)
    not_in_index = (*_OF_TRAJECTORY, "fate")
    of_index = [name for name in DATASET_SCHEMA.names if name not in not_in_index]
    count = 0
    with (
        none_unfinished(into),
        pq.ParquetWriter(unfinished(into), DATASET_SCHEMA, compression="zstd") as writer,
    ):
        while batch := list(islice(episodes, _AT_ONCE)):
            rows = [
                {name: episode["row"][name] for name in of_index}
                | {name: episode["trajectory"].get(name) for name in _OF_TRAJECTORY}
                | {"messages": list(map(_name_images, episode["trajectory"]["messages"]))}
                | {"fate": episode["fate"]}
                for episode in batch
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema=DATASET_SCHEMA))
            count += len(rows)
    if count:
        unfinished(into).replace(into)
    else:
        unfinished(into).unlink()
    return count


def _name_images(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": named_images(message)}


def atif_of(episode: Mapping[str, Any], run: str, model: str | None) -> dict[str, Any]:
    """An episode of `EpisodeReader` as an ATIF document. Tokens, logprobs and versions are among
    its metrics.
    """
    row, played = episode["row"], episode["trajectory"]
    steps: list[dict[str, Any]] = []
    turns = iter(with_prompts(played["turns"]))
    for message in linked_messages(played["messages"]):
        if message.role == "tool" and steps and steps[-1]["source"] == "agent":
            _add_tool_result(steps[-1], message)
        elif message.is_answer:
            steps.append(_agent_step(message, next(turns, None)))
        else:
            source = {"system": "system", "assistant": "agent"}.get(message.role, "user")
            steps.append({"source": source, "message": message.content})
    counts = [len(turn["token_ids"]) for turn in played["turns"]]
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": run,
        "trajectory_id": row["id"] + (f"/{row['agent']}" if row["agent"] else ""),
        "agent": {
            "name": row["agent"] or "agentrl",
            "version": installed_version(),
            "model_name": model,
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": sum(len(turn["prompt_ids"]) for turn in played["turns"]),
            "total_completion_tokens": sum(counts),
            "total_steps": len(steps),
        },
        "extra": {
            "environment": row["env"],
            "seed": played["seed"],
            "status": row["status"],
            "success": row["success"],
            "score": row["score"],
            "parts": json.loads(played["parts"]),
            "words": json.loads(played.get("words") or "{}"),  # earlier versions kept none
            "training_step": row["step"],
            "samples": [sample["sample"] for sample in episode["samples"]],
            "fate": episode["fate"],
        },
    }


def _episodes(
    reader: EpisodeReader, index: EpisodeIndex, step: int | None
) -> Iterator[dict[str, Any]]:
    offset = 0
    while True:
        query = EpisodeQuery(
            step=step, kind=KINDS[0], sort="id", descending=False, offset=offset, limit=_AT_ONCE
        )
        rows = index.page(query)["rows"]
        if not rows:
            return
        for row in rows:
            if row["place"] is not None:
                yield reader.episode(row["id"], row["agent"] or "", row["step"])
        offset += len(rows)


def _agent_step(
    message: Message, prompted: tuple[Mapping[str, Any], list[int]] | None
) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": message.said, "llm_call_count": 1}
    if message.reasoning:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [
            {
                "tool_call_id": call.id,
                "function_name": call.name,
                "arguments": dict(call.arguments),
            }
            for call in message.tool_calls
        ]
    if prompted is not None:
        turn, prompt_ids = prompted
        step["metrics"] = {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(turn["token_ids"]),
            "prompt_token_ids": prompt_ids,
            "completion_token_ids": turn["token_ids"],
            "logprobs": turn["logprobs"],
            "extra": {
                "policy_versions": turn["policy_versions"],
                "reward": turn["reward"],
                "forked": turn["forked"],
            },
        }
        if turn.get("asked"):
            step["timestamp"] = datetime.fromtimestamp(turn["asked"], UTC).isoformat()
    return step


def _add_tool_result(step: dict[str, Any], message: Message) -> None:
    """Add a tool's result to the step that called it."""
    results = step.setdefault("observation", {"results": []})["results"]
    result = {"content": message.content}
    if message.tool_call_id:
        result["source_call_id"] = message.tool_call_id
    results.append(result)
