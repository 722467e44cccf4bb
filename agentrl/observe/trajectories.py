"""Trajectories on disk: a Parquet file per step with a row per trajectory, both exact tokens and
readable text.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.observe.run_images import RunImages
from agentrl.observe.tool_calls import called_tools
from agentrl.trajectory import SEGMENT, Group, Score, Trajectory, succeeded

_MESSAGE = pa.struct(
    [
        *(
            (name, pa.string())
            for name in ("role", "content", "reasoning", "tool_calls", "tool_call_id")
        ),
        ("given", pa.bool_()),
        ("images", pa.list_(pa.string())),
    ]
)
_PLACED = pa.struct([("start", pa.int32()), ("tokens", pa.int32()), ("image", pa.string())])
_TURN = pa.struct(
    [
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("forked", pa.bool_()),
        ("reward", pa.float64()),
        ("info", pa.string()),
        ("generate_seconds", pa.float64()),
        ("env_seconds", pa.float64()),
        ("asked", pa.float64()),
        ("picture", pa.string()),
        ("trained", pa.bool_()),
        ("images", pa.list_(_PLACED)),
    ]
)
_CALL = pa.struct(
    [
        ("turn", pa.int32()),
        ("name", pa.string()),
        ("refused", pa.bool_()),
        ("seconds", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("agent", pa.string()),
        ("opponent", pa.int32()),
        ("task", pa.string()),
        ("env", pa.string()),
        ("seed", pa.int64()),
        ("options", pa.string()),
        ("status", pa.string()),
        ("detail", pa.string()),
        ("trained_turns", pa.int32()),
        ("parent", pa.string()),
        ("branch_turn", pa.int32()),
        ("started", pa.float64()),
        ("seconds", pa.float64()),
        ("num_turns", pa.int32()),
        ("num_tokens", pa.int64()),
        ("num_forks", pa.int32()),
        ("oldest_version", pa.int32()),
        ("success", pa.bool_()),
        ("score", pa.float64()),
        ("parts", pa.string()),
        ("words", pa.string()),
        ("scoring", pa.list_(pa.struct([("began", pa.float64()), ("ended", pa.float64())]))),
        ("picture", pa.string()),
        ("calls", pa.list_(_CALL)),
        ("messages", pa.list_(_MESSAGE)),
        ("turns", pa.list_(_TURN)),
    ]
)
"""`options` (the task's), `info`, `parts`, `words` (what judges said, by part) and `tool_calls` are
JSON; `detail` is the limit, the error or the reason in the status. `started`, `asked` and the times
of `scoring`, when rewards worked on the episode, are Unix time, in seconds. `num_tokens` are the
sampled ones, `oldest_version` that of the new turns. `picture` is HTML: the environment's drawing
of the state that a turn answers, and of the last one. A message that was `given` came with the task
and was not sampled in the episode, whatever its role. The `images` of a message are names of files
in the run's folder `images`, each named after its content; those of a turn are the ones in its
`prompt_ids`, each with its first token there and how many it has. A turn that is not `trained` is
masked.
`calls` are those of tools (`agentrl/observe/tool_calls.py`); one without a name could not be read.

The first `trained_turns` turns are trained on in another row: of an earlier step with the same id,
if the episode was cut into segments, or of the episode that a branch has left, in the same step.
That one's id is the `parent` of a branch, and `branch_turn` its own first turn, from 0; both are
null for episodes that were played from their beginning.
"""


_ROWS_AT_A_TIME = 64


def episodes_of_step(groups: Iterable[Group]) -> list[tuple[Trajectory, Score]]:
    """What a step was trained on, as `write_trajectories` takes it.

    Of a group that goes on, an episode that is over counts as a part too: a row of a later step has
    it whole, beside the other members, and no reader may take it for two episodes.
    """
    scored: list[tuple[Trajectory, Score]] = []
    for group in groups:
        found = group.trajectories
        if group.partial:
            found = tuple(replace(trajectory, status=SEGMENT) for trajectory in found)
        scored += zip(found, group.scores, strict=True)
    return scored


def write_trajectories(
    path: Path, scored: Iterable[tuple[Trajectory, Score]], epoch: float = 0.0
) -> None:
    """Write (trajectory, score) pairs to `path`, all or none, and their pictures, which are there
    before it.

    `epoch`: the Unix time, in seconds, at which the clock of the trajectories showed 0.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, pairs = path.with_suffix(".unfinished"), iter(scored)
    images = RunImages(path.parent.parent)
    with pq.ParquetWriter(unfinished, SCHEMA, compression="zstd") as writer:
        # A few at a time: while pyarrow reads Python's values, no other thread can run.
        while some := list(islice(pairs, _ROWS_AT_A_TIME)):
            for trajectory, _ in some:
                images.keep(image for message in trajectory.messages for image in message.images)
                images.keep(placed.image for turn in trajectory.turns for placed in turn.images)
            rows = [_row(trajectory, score, epoch) for trajectory, score in some]
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    unfinished.replace(path)


def _row(trajectory: Trajectory, score: Score, epoch: float) -> dict[str, object]:
    status = trajectory.status
    return {
        "id": trajectory.id,
        "agent": trajectory.agent,
        "opponent": trajectory.opponent,
        "task": trajectory.task.id,
        "env": trajectory.task.env,
        "seed": trajectory.task.seed,
        "options": json.dumps(dict(trajectory.task.options), default=repr),
        "status": status.name,
        "detail": next(
            (str(getattr(status, n)) for n in ("limit", "error") if hasattr(status, n)), ""
        ),
        "trained_turns": trajectory.trained_turns,
        "parent": None if trajectory.branch is None else trajectory.branch.parent,
        "branch_turn": None if trajectory.branch is None else trajectory.branch.turn,
        "started": trajectory.started + epoch,
        "seconds": trajectory.seconds,
        "num_turns": len(trajectory.turns),
        "num_tokens": trajectory.num_tokens,
        "num_forks": sum(turn.forked for turn in trajectory.turns),
        "oldest_version": trajectory.oldest_version,
        "success": succeeded(trajectory, score),
        "score": None if math.isnan(score.value) else score.value,  # of one that failed
        "parts": json.dumps(dict(score.parts)),
        "words": json.dumps(dict(score.explanations)),
        "scoring": [
            {"began": began + epoch, "ended": ended + epoch} for began, ended in score.scoring_spans
        ],
        "picture": trajectory.picture,
        "calls": [asdict(call) for call in called_tools(trajectory)],
        "messages": [
            {
                "role": message.role,
                "content": message.content,
                "reasoning": message.reasoning,
                "tool_calls": json.dumps([asdict(call) for call in message.tool_calls])
                if message.tool_calls
                else "",
                "tool_call_id": message.tool_call_id,
                "given": message.given,
                "images": [image.name for image in message.images],
            }
            for message in trajectory.messages
        ],
        "turns": [
            {
                "prompt_ids": turn.prompt_ids,
                "token_ids": turn.completion.token_ids,
                "logprobs": turn.completion.logprobs,
                "policy_versions": turn.completion.policy_versions,
                "finish_reason": turn.completion.finish_reason,
                "forked": turn.forked,
                "reward": turn.reward,
                "info": json.dumps(dict(turn.info), default=repr),
                "generate_seconds": turn.generate_seconds,
                "env_seconds": turn.env_seconds,
                "asked": turn.asked + epoch,
                "picture": turn.picture,
                "trained": turn.trained,
                "images": [
                    {"start": placed.start, "tokens": placed.tokens, "image": placed.image.name}
                    for placed in turn.images
                ],
            }
            for turn in trajectory.turns
        ],
    }
