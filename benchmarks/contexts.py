"""What a model learns with each context: all of a conversation, a window, or its own summaries.

    python -m benchmarks.contexts                   # all of them, with the seeds 1, 2 and 4
    python -m benchmarks.contexts full --seeds 1    # runs/contexts/full-1

The task is the T-maze of examples/t_maze.yaml with a corridor of eight steps: a sign, shown in the
second of ten turns, says where to turn in the last. With summaries, one or two of them have to
carry the sign there. The model imitates a player that turns at the sign eight times in ten and, for
the contexts with summaries, tells the sign in eight of ten (`weak_summary`), each with the context
that it then learns with. Both contexts with summaries begin with one model. A run that has ended is
not trained again, and one that was stopped goes on.

The table has held-out success before and after, with 95 % intervals; the tokens of the samples that
were trained on, and those that carried loss; and the forks of an episode. Rows
over seeds have the mean, with its standard error.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev

from agentrl.envs.oracle import OracleEnv
from benchmarks.training import run_to_end

CONFIG = Path(__file__).parents[1] / "examples" / "t_maze.yaml"
RUNS = Path("runs/contexts")
SUMMARY = "name: summary, max_prompt_tokens: 100"
CONTEXTS = {
    "full": "{name: full}",
    "last_k": "{name: last_k, turns: 4}",
    "summary, trained": f"{{{SUMMARY}}}",
    "summary, masked": f"{{{SUMMARY}, train: false}}",
}
IMITATED = {"summary, masked": "summary, trained"}
"""The context whose run has imitated the model that this one begins with."""
SETTINGS = (
    "env.options.settings={length: 4}",
    "rollout.budget.turns=6",
    "rollout.sampling.max_tokens=20",
    "recipe.demonstrations.options={skill: 0.6}",
    "recipe.demonstrations.episodes=3072",
    "evaluation.tasks=200",
    "trackers=[]",
)
TELLS = 0.6
"""Share of weak summaries that tell the sign; half of the others tell it by chance."""


def weak_summary(env: OracleEnv, rng: Random) -> str:
    """A summary that often tells where the sign points."""
    shown = " ".join(message.content for message in env.point.messages)
    side = "left" if "points left" in shown else "right"
    return f"A sign points {side if rng.random() < TELLS else rng.choice(['left', 'right'])}."


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    before: float
    after: float
    tokens: float
    with_loss: float
    forks: float


def trained(context: str, seed: int) -> Path:
    """The folder of a run that has ended; it is trained, if it has not been."""
    settings = [*SETTINGS, f"seed={seed}", f"rollout.context={CONTEXTS[context]}"]
    if context in IMITATED:
        first = trained(IMITATED[context], seed)
        settings = [one for one in settings if not one.startswith("recipe.demonstrations.")]
        settings += [f"model={first / 'demonstrations'}", "recipe.demonstrations=null"]
    elif context.startswith("summary"):
        settings.append("recipe.demonstrations.summaries=benchmarks.contexts:weak_summary")
    return run_to_end(RUNS / f"{context.replace(', ', '-')}-{seed}", CONFIG, settings)


def row_of(context: str, seed: int) -> Row:
    """The row of a run."""
    folder = trained(context, seed)
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss_tokens" in row]
    return Row(
        summary["success_before"],
        summary["success_after"],
        sum(row["tokens"] for row in steps),
        sum(row["loss_tokens"] for row in steps),
        sum(row["forked_turns"] for row in steps) / sum(row["live_episodes"] for row in steps),
    )


def described(context: str, seeds: str, rows: Sequence[Row]) -> str:
    """Rows as one of the table: their means, with standard errors if they are several."""
    cells = []
    for field, shown in zip(
        fields(Row), ("{:.1%}", "{:.1%}", *["{:,.0f}"] * 2, "{:.2f}"), strict=True
    ):
        values = [getattr(row, field.name) for row in rows]
        cell = shown.format(fmean(values))
        if len(values) > 1 and "%" in shown:
            cell += f" ± {stdev(values) / sqrt(len(values)):.1%}"
        cells.append(cell)
    return f"| `{context}` | {seeds} | {' | '.join(cells)} |"


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.contexts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("contexts", nargs="*", metavar="CONTEXT", help=f"of {', '.join(CONTEXTS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=(1, 2, 4))
    args = parser.parse_args()
    if unknown := sorted(set(args.contexts) - CONTEXTS.keys()):
        parser.error(f"there is no context {unknown[0]!r}: {', '.join(CONTEXTS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| context | seed | before | after | tokens | with loss | forks |")
    print("|---|---|---|---|---|---|---|")
    for context in args.contexts or CONTEXTS:
        rows = []
        for seed in args.seeds:
            rows.append(row_of(context, seed))
            print(described(context, str(seed), rows[-1:]), flush=True)
        if len(rows) > 1:
            print(described(context, f"mean of {len(rows)}", rows), flush=True)


if __name__ == "__main__":
    main()
