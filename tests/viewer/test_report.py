"""The report of a run: one file, which says what the run's own files say, and in which no text of a
run runs.
"""

import json
import re
from html import unescape

import pytest

from agentrl.errors import ConfigError
from agentrl.observe.metrics import MetricsFile
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.viewer.report import write_report
from agentrl.viewer.report_curves import HEIGHT, WIDTH, curves_of


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    run = MadeUpRun(
        folder / "a run", texts=("What is next?", "x" * 5000), settings={"trainer": {"lr": 0.5}}
    )
    run.begin()
    for _ in range(3):
        run.step()
    metrics = MetricsFile(run.folder / "metrics.jsonl")
    for step, success in ((0, 0.25), (3, 0.75)):
        row = {
            "eval/success": success,
            "eval/success_low": success - 0.1,
            "eval/success_high": success + 0.1,
        }
        metrics.append(
            {"step": step, **row, "eval/reward": success, "eval/episodes": 40, "eval/failed": 2}
        )
    (run.folder / "warnings.jsonl").write_text(
        json.dumps({"step": 1, "text": "look <here>"}) + "\n"
    )
    write_report(run.folder, folder / "a run.html")
    return unescape(re.sub(r"\s+", " ", (folder / "a run.html").read_text()))


@pytest.mark.parametrize(
    "values", [[0.5], [0.5, 0.5], [0.0, 0.3], [1e-7, 3e-7, 2.9e-7], [-1.0, 5.0, 400.0, 2.0, 1.0]]
)
def test_every_axis_of_a_curve_has_three_ticks_or_more(values):
    (curve,) = curves_of([{"step": step, "reward": value} for step, value in enumerate(values)])
    assert len(curve.ticks_x) >= 3
    assert len(curve.ticks_y) >= 3
    assert len({text for _, text in curve.ticks_y}) == len(curve.ticks_y)


def test_it_says_what_the_run_did(written):
    assert "The run was killed: its process 0 is gone" in written
    assert "look <here>" in written
    assert re.search(
        r"held out</td><td class=.number.>3</td><td class=.number.>75.0 % <span[^>]*>65.0 % to"
        r" 85.0 %",
        written,
    )
    assert re.search(r"trained</span></td><td class=.number.>48<", written)
    assert re.search(r"<td>environment</td><td class=.number.>3<", written)
    assert "The trainer does not train in 70% of the time" in written
    assert re.search(r"steps</td> ?<td class=.mono.>100</td> ?<td[^>]*>command line<", written)


def test_it_shows_the_best_the_worst_the_median_and_a_failed_episode(written):
    kinds = re.findall(
        r"<summary><b>(.*?)</b> · <span[^>]*>(.*?)</span> · score (.*?)</summary>", written
    )
    assert [kind for kind, _, _ in kinds] == [
        "The best of step 2",
        "The worst of step 2",
        "The median of step 2",
        "One that failed",
    ]
    best, worst, median = (float(score) for _, _, score in kinds[:3])
    assert worst <= median <= best
    assert worst < best
    assert "was trained at step 2 as sample" in written
    assert "… (1,000 more characters)" in written


def test_it_names_no_other_file_and_holds_no_program(written):
    assert "default-src 'none'" in written
    assert not re.search(
        r"<script|<link|<img|<iframe|<object|\bsrc=|\bhref=|\bon\w+=|url\(|@import", written
    )


def test_it_shows_what_environments_draw_in_frames_as_far_as_they_fit(tmp_path):
    pictures = [f'<p class="board">board {number}\'{"x" * 100_000}</p>' for number in range(4)]
    run = MadeUpRun(tmp_path / "run", turns=3, pictures=pictures)
    run.begin()
    run.step()
    write_report(run.folder, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    frames = re.findall(
        r'<iframe class="picture" sandbox="" referrerpolicy="no-referrer" [^>]*srcdoc="([^"]*)">',
        text,
    )
    assert text.count("<iframe") == len(frames) == 3 * 2  # two of an episode's four fit
    assert all("<" not in frame for frame in frames)
    drawn = [unescape(frame) for frame in frames[:2]]
    assert [re.search(r"board (\d)'", each)[1] for each in drawn] == ["0", "1"]
    assert all("default-src 'none'" in each for each in drawn)
    assert text.count("2 pictures are left out") == 3


def test_a_run_that_has_not_begun_has_a_report_too(tmp_path):
    run = MadeUpRun(tmp_path / "new")
    run.begin()
    write_report(run.folder, tmp_path / "new.html")
    text = (tmp_path / "new.html").read_text()
    assert "The run is not running, and nothing was recorded." in text
    assert "No step was finished." in text
    with pytest.raises(ConfigError, match="there is no folder"):
        write_report(run.folder, tmp_path / "none" / "new.html")


def test_a_run_that_learned_from_pairs_counts_its_updates_and_shows_their_curves(tmp_path):
    run = MadeUpRun(tmp_path / "pairs")
    run.begin()
    metrics = MetricsFile(run.folder / "metrics.jsonl")
    for step in range(6):
        metrics.append(
            {
                "step": step,
                "loss": 0.7 - step / 10,
                "preference_loss": 0.7 - step / 10,
                "accuracy": 0.5,
            }
        )
    write_report(run.folder, tmp_path / "pairs.html")
    text = re.sub(r"\s+", " ", (tmp_path / "pairs.html").read_text())
    assert "The run is not running." in text
    assert re.search(r"steps</[a-z]+>\s*<[^>]+>6<", text)
    assert "preference_loss" in text


def test_the_command_writes_a_file_of_the_runs_name(tmp_path, agentrl):
    run = MadeUpRun(tmp_path / "runs" / "short")
    run.begin()
    done = agentrl("report", str(run.folder), "-o", str(tmp_path / "short.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "short.html").read_text().startswith("<!doctype html>")


def test_a_curve_lies_in_its_frame_and_long_runs_are_drawn_by_means():
    rows = [
        {"step": step, "reward": float(step), "kl": float("nan"), "success": None}
        for step in range(1000)
    ]
    (curve,) = curves_of(rows)
    assert (curve.name, curve.first, curve.last, curve.low, curve.high) == (
        "reward",
        0,
        999,
        0,
        999,
    )
    assert curve.per_point == 3
    points = [tuple(map(float, pair.split())) for pair in curve.line.removeprefix("M").split("L")]
    assert len(points) == 400
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))


def test_an_interval_is_a_band_around_its_curve():
    rows = [
        {"step": step, "eval/success": 0.5, "eval/success_low": 0.4, "eval/success_high": 0.6}
        for step in (0, 5)
    ]
    (curve,) = curves_of(rows)
    line, band = (
        {float(pair.split()[1]) for pair in path.strip("MZ").split("L")}
        for path in (curve.line, curve.band)
    )
    assert min(band) < min(line) <= max(line) < max(band)
    assert len(curve.dots) == 2
