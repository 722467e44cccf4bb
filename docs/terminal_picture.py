"""Draw `docs/pictures/terminal.png`: the picture of a made-up run's progress, as a terminal has it.

    python docs/terminal_picture.py

It needs Chromium.
"""

import io
import math
import random
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from agentrl.observe.dashboard import Dashboard
from agentrl.observe.run_progress import EnvPace, RunProgress
from agentrl.rollout.accounts import OpenGroup, SchedulerStatus

PICTURE = Path(__file__).parent / "pictures" / "terminal.png"
COLUMNS = 96
STEPS = 37


def made_up() -> RunProgress:
    """A run of which `STEPS` of 100 steps are done."""
    at = [0.0]
    progress = RunProgress(100, "runs/frozen_lake", lambda: at[0])
    rng = random.Random(0)
    for step in range(STEPS):
        progress.begin_phase("rollout")
        at[0] += 14
        reward = 0.56 * (1 - math.exp(-step / 12)) + rng.uniform(0.0, 0.04)
        progress.step(
            step,
            {
                "seconds": 12.0,
                "seconds/rollout": 7.0,
                "seconds/train": 4.5,
                "seconds/weights": 0.5,
                "reward": reward,
                "success": 0.58,
                "turns": 4.3,
                "tokens_per_second": 13040.0,
                "staleness/mean": 0.4,
                "staleness/max": 1.0,
                "logprob_gap_max": 1.2e-6,
            },
        )
    progress.begin_phase("rollout")
    at[0] += 5
    progress.held_out = (30, 0.613)
    progress.slowest = (EnvPace("sokoban", 1.31, 10.2), EnvPace("frozen_lake", 0.02, 0.1))
    longest = [
        OpenGroup("train-000412", "sokoban", 75.0),
        OpenGroup("train-000413", "sokoban", 34.0),
    ]
    progress.underway = lambda: SchedulerStatus(
        96, 128, 11, 16, {"environment": 3, "engine": 1}, longest
    )
    progress.warn(
        STEPS - 1,
        f"in 3 steps in a row, up to step {STEPS - 1}: 12% of the answers were cut at "
        "rollout.sampling.max_tokens=256: raise it, or ask for shorter answers",
    )
    return progress


def main() -> None:
    """Draw it."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Dashboard(made_up()))
    with tempfile.TemporaryDirectory() as folder:
        drawing, page = Path(folder) / "terminal.svg", Path(folder) / "page.html"
        console.save_svg(str(drawing), title="agentrl train")
        svg = drawing.read_text()
        width, height = (
            int(float(one)) + 1 for one in svg.split('viewBox="0 0 ')[1].split('"')[0].split()
        )
        page.write_text(f"<body style='margin: 0'>{svg}</body>")
        subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--window-size={width},{height}",
                f"--screenshot={PICTURE}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    main()
