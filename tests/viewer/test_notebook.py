"""`agentrl.viewer.notebook`: pictures of runs, and errors that say what there is."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.viewer.notebook import metrics_of, moving_mean, plot

PNG = b"\x89PNG\r\n"


@pytest.fixture
def runs(tmp_path):
    for number, name in enumerate(("one", "two")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text("steps: 6\n")
        rows = [
            {"step": step, "reward": step / 10 + number, "success": step / 10} for step in range(6)
        ]
        rows.insert(
            0, {"step": 0, "eval/success": 0.2, "eval/success_low": 0.1, "eval/success_high": 0.35}
        )
        rows.append(
            {"step": 6, "eval/success": 0.6, "eval/success_low": 0.5, "eval/success_high": 0.7}
        )
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def panels(made) -> dict:
    return {axes.get_title(): axes for axes in made.figure.axes if axes.get_visible()}


def test_names_of_runs_and_metrics_are_no_formulas(runs):
    (runs / "one").rename(runs / "cost_$5_$6")
    with (runs / "two" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "envs/$5_$/success": 0.5}\n')
    assert plot(runs, metrics=["envs/$5_$/success"])._repr_png_().startswith(PNG)


def test_each_metric_has_a_panel_with_a_line_for_each_run_and_points_for_held_out_tasks(runs):
    made = plot(runs)
    found = panels(made)
    assert list(found) == ["reward", "success"]
    lines = {line.get_label(): line for line in found["reward"].lines}
    assert list(lines) == ["one", "two"]
    assert lines["two"].get_xdata().tolist() == [0, 1, 2, 3, 4, 5]
    assert lines["two"].get_ydata().tolist() == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    bars, _ = found["success"].containers
    points, _, (spread,) = bars
    assert points.get_xdata().tolist() == [0, 6]
    assert points.get_ydata().tolist() == [0.2, 0.6]
    ends = [segment[:, 1].tolist() for segment in spread.get_segments()]
    assert ends == [pytest.approx([0.1, 0.35]), pytest.approx([0.5, 0.7])]


def test_a_notebook_gets_a_picture_and_a_file_can_be_written(runs, tmp_path):
    made = plot(runs / "one", str(runs / "two"), metrics=["success"], smooth=3)
    assert made._repr_png_().startswith(PNG)
    made.save(tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_errors_say_what_there_is(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"'rewards'.*reward"):
        plot(runs, metrics=["rewards"])
    with pytest.raises(ConfigError, match="no folder"):
        plot(runs / "three")
    with pytest.raises(ConfigError, match="smooth=0"):
        plot(runs, smooth=0)
    with pytest.raises(ConfigError, match=r"plot\('runs/frozen_lake'\)"):
        plot()
    (runs / "one" / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no step has ended"):
        plot(runs / "one")


def test_metrics_are_rows_for_a_data_frame(runs):
    rows = metrics_of(runs / "one")
    assert [row["reward"] for row in rows if "reward" in row] == pytest.approx(
        [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    )
    with pytest.raises(ConfigError, match="no folder"):
        metrics_of(runs / "three")
    with pytest.raises(ConfigError, match="holds 2 runs"):
        metrics_of(runs)


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), steps=st.integers(1, 60))
def test_a_moving_mean_is_that_of_the_last_steps(values, steps):
    expected = [np.mean(values[max(0, end - steps) : end]) for end in range(1, len(values) + 1)]
    assert moving_mean(np.array(values), steps) == pytest.approx(expected, abs=1e-9)


def test_importing_it_loads_neither_torch_nor_matplotlib():
    code = (
        "import sys, agentrl.viewer.notebook; sys.exit(any(name in sys.modules for name in"
        " ('torch', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
