"""Episodes as lines of other libraries: rollouts as verifiers saves them, training traces of
OpenEnv.

`agentrl.recipes.foreign_recordings` reads both.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from agentrl.conversation.chats import as_json
from agentrl.errors import ConfigError
from agentrl.observe.run_images import named_images
from agentrl.trajectory import SEGMENT, Message, ToolCall

Layout = Literal["verifiers", "openenv"]


def lines_of(episodes: Iterable[Mapping[str, Any]], layout: Layout) -> Iterator[dict[str, Any]]:
    """A line for each episode of `EpisodeReader`, and none for a part of one that goes on: a later
    step has it whole.

    Raises:
        ConfigError: OpenEnv has no form for an episode: it has no token.
    """
    whole = (episode for episode in episodes if episode["row"]["detail"] != SEGMENT.limit)
    if layout == "openenv":
        yield from map(_openenv_trace, whole)
        return
    numbers = dict[str, int]()
    for episode in whole:
        yield _verifiers_rollout(episode, numbers.setdefault(episode["row"]["task"], len(numbers)))


def linked_messages(rows: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages of an episode, with pictures named in the text. All calls have ids, and a tool's
    result has that of its call: the one that it names, or else the next of the last answer.
    """
    found, waiting = list[Message](), deque[str]()
    for number, row in enumerate(rows):
        calls = tuple(
            ToolCall(call["name"], call["arguments"], call.get("id") or f"call-{number}-{place}")
            for place, call in enumerate(json.loads(row["tool_calls"] or "[]"))
        )
        message = Message(
            row["role"],
            named_images(row),
            row["reasoning"] or "",
            calls,
            row["tool_call_id"] or "",
            given=bool(row.get("given")),
        )
        if message.role == "assistant":
            waiting = deque(call.id for call in calls)
        elif message.role == "tool":
            if message.tool_call_id not in waiting:
                message = replace(message, tool_call_id=waiting[0] if waiting else "")
            if waiting:
                waiting.remove(message.tool_call_id)
        found.append(message)
    return found


def with_prompts(
    turns: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], list[int]]]:
    """Each turn with its whole prompt."""
    shown: list[int] = []
    for turn in turns:
        shown = [*([] if turn["forked"] else shown), *turn["prompt_ids"]]
        yield turn, shown
        shown = [*shown, *turn["token_ids"]]


def _verifiers_rollout(episode: Mapping[str, Any], example: int) -> dict[str, Any]:
    """A row of the `results.jsonl` of verifiers (`RolloutOutput`). `example`: the number of the
    task.
    """
    row, played = episode["row"], episode["trajectory"]
    messages = linked_messages(played["messages"])
    first = next((at for at, one in enumerate(messages) if one.is_answer), len(messages))
    answer = json.loads(played.get("options") or "{}").get("answer")
    parts = {
        name: value
        for name, value in json.loads(played["parts"] or "{}").items()
        if isinstance(value, int | float)
    }
    rollout = {
        "example_id": example,
        "prompt": [_verifiers_message(one) for one in messages[:first]],
        "completion": [_verifiers_message(one) for one in messages[first:]],
        **({} if answer is None else {"answer": str(answer)}),
        "info": {
            **{name: row[name] for name in ("id", "agent", "task", "env", "step", "success")},
            "seed": played["seed"],
            "fate": episode["fate"],
        },
        "reward": row["score"],
        "error": None,
        "timing": {
            "start_time": played["turns"][0].get("asked") or 0.0 if played["turns"] else 0.0
        },
        "is_completed": True,  # it is over, for whatever reason
        "is_truncated": any(turn["finish_reason"] == "length" for turn in played["turns"][-1:]),
        "stop_condition": row["status"],
        "metrics": parts,
        "tool_defs": None,
    }
    return {**parts, **rollout}  # verifiers writes metrics as columns of their own too


def _verifiers_message(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {
            "role": "tool",
            "tool_call_id": message.tool_call_id,
            "content": message.content,
        }
    written: dict[str, Any] = {"role": message.role, "content": message.said}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            json.dumps(
                {"id": call.id, "name": call.name, "arguments": json.dumps(dict(call.arguments))}
            )
            for call in message.tool_calls
        ]
    return written


def _openenv_trace(episode: Mapping[str, Any]) -> dict[str, Any]:
    """A `TrainingTrace`, whose turns have what an environment knows in their metadata: the score of
    the episode as the last turn's `reward`.
    """
    row, played = episode["row"], episode["trajectory"]
    messages = linked_messages(played["messages"])
    answers = [at for at, message in enumerate(messages) if message.is_answer]
    turns = list[dict[str, Any]]()
    for number, (turn, prompt_ids) in enumerate(with_prompts(played["turns"])):
        trained = int(turn.get("trained") is not False)
        kept = number < len(answers)
        choice: dict[str, Any] = {"finish_reason": turn["finish_reason"]}
        if kept:
            choice["message"] = as_json(messages[answers[number]])
        shown = messages[: answers[number]] if kept else ()
        turns.append(
            {
                "node_id": f"{row['id']}/{number}",
                "prompt_token_ids": prompt_ids,
                "completion_token_ids": turn["token_ids"],
                # Rounding leaves some a little above certainty.
                "per_token_logps": [min(0.0, value) for value in turn["logprobs"]],
                "loss_mask": [0] * len(prompt_ids) + [trained] * len(turn["token_ids"]),
                "request": {"messages": [as_json(one) for one in shown]} if kept else {},
                "response": {"choices": [choice]},
                "metadata": {"policy_versions": turn["policy_versions"]},
            }
        )
    if not turns:
        raise ConfigError(
            f"{row['id']} has no turn, and a training trace is made of turns: choose another step"
            " (--step), or the format verifiers"
        )
    turns[-1]["metadata"] |= {
        "reward": row["score"],
        **{name: row[name] for name in ("id", "agent", "task", "env", "step", "success")},
        "seed": played["seed"],
    }
    return {"schema_version": 1, "turns": turns}
