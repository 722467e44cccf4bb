"""Self-play as a user runs it: who plays whom is recorded, a killed run meets the same opponents,
play gets better.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.ledger.ledger import Ledger
from agentrl.recipes.self_play import check_matches
from agentrl.rollout.opponents import Matches
from tests.ledger.ledger_queries import trained_tasks
from tests.recipes.renaming import rename_metrics
from tests.recipes.test_runs import ROOT, folder, kill_during, start, train

EXAMPLE = str(ROOT / "examples" / "kuhn_self_play.yaml")
SMALL = [
    EXAMPLE,
    "recipe.demonstrations.player=agentrl.envs.kuhn_poker:weak_player",
    "recipe.demonstrations.episodes=256",
    "trainer.lr=3e-4",
    "recipe.every=1",
    "recipe.pool=2",
    "rollout.groups_per_step=8",
    "evaluation.tasks=0",
    "trackers=[]",
    "checkpoint.every=1",
]
DRAWN = ["recipe.draw=prioritised", "recipe.engines=2", "recipe.pool=3"]


def rows_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward" in row]


def opponents_of(run: Path) -> dict[int, list]:
    """Who played each recorded episode, by step."""
    files = sorted((run / "trajectories").glob("step_*.parquet"))
    return {
        step: [
            (row["id"], row["agent"], row["opponent"]) for row in pq.read_table(file).to_pylist()
        ]
        for step, file in enumerate(files)
    }


@pytest.mark.slow
@pytest.mark.long
def test_a_run_gets_nearer_to_optimal_play_and_records_whom_the_policy_played(tmp_path):
    train(*SMALL, "run_dir=run", "steps=8", "recipe.latest=0.4", "checkpoint.keep=1", cwd=tmp_path)
    rows, played = rows_of(tmp_path / "run"), opponents_of(tmp_path / "run")
    assert rows[-1]["exact/exploitability"] < rows[0]["exact/exploitability"]
    for step, row in enumerate(rows):
        assert row["exact/legal"] > 0.9
        against = [one for one in played[step] if one[2] is not None]
        assert row["opponents/share"] == pytest.approx(len(against) / len(played[step]))
        assert {version for _, _, version in against} <= set(range(step)[-2:])
        seats = [agent for _, agent, _ in against]
        assert seats.count("north") == seats.count("south")
        assert len({episode for episode, *_ in against}) == len(against), (
            "an opponent's words are not trained on"
        )
        for version in {version for _, _, version in against}:
            for agent in ("north", "south"):
                assert 0 <= row[f"opponents/{version}/{agent}/success"] <= 1
        assert {"baseline/kuhn_poker/north", "baseline/kuhn_poker/south"} <= row.keys()
    assert any(row["opponents/share"] > 0 for row in rows)
    snapshots = sorted(path.name for path in (tmp_path / "run" / "opponents").iterdir())
    # Two, and what the checkpoint needs that was complete by the last step: of one or two before.
    assert snapshots[-2:] == ["version_000007", "version_000008"]
    assert snapshots[0] >= "version_000004"


@pytest.mark.long
@pytest.mark.parametrize(("steps", "kills"), [(4, [2]), (6, [2, 4])])
def test_a_killed_run_meets_the_same_opponents_and_ends_in_the_same_weights(tmp_path, steps, kills):
    settings = [*SMALL, *DRAWN, f"steps={steps}", "run_dir=run"]
    whole = train(*settings, cwd=folder(tmp_path, "whole"))
    killed_in = folder(tmp_path, "killed")
    arguments = settings
    for at in kills:
        kill_during(start(*arguments, cwd=killed_in), killed_in / "run", steps=at, extra=0.2)
        rename_metrics(killed_in / "run")
        arguments = ["--resume", "run"]
    killed = train("--resume", "run", cwd=killed_in)
    runs = [tmp_path / name / "run" for name in ("whole", "killed")]
    assert opponents_of(runs[0]) == opponents_of(runs[1])
    exact = [
        [(row["exact/exploitability"], row["baseline/kuhn_poker/north"]) for row in rows_of(run)]
        for run in runs
    ]
    renamed = kills[-1] + 1  # steps, of the rows before the last launch
    assert exact[0][-len(exact[1]) :] == exact[1]
    assert len(exact[1]) >= steps - renamed
    with Ledger(runs[0] / "ledger.sqlite") as a, Ledger(runs[1] / "ledger.sqlite") as b:
        assert trained_tasks(a) == trained_tasks(b)
        assert b.episode_fates().settled
    assert killed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.long
def test_opponents_stay_within_the_staleness_bound_of_nothing(tmp_path):
    """Games against snapshots while the trainer works: the policy's own tokens keep the bound."""
    summary = train(
        *SMALL, "run_dir=run", "steps=4", "recipe.latest=0", "rollout.max_staleness=1", cwd=tmp_path
    )
    assert summary["largest_staleness"] <= 1
    assert summary["episodes"]["open"] == 0
    assert summary["tasks"]["trained"] == 32


def config_of(tmp_path: Path, *overrides: str):
    (tmp_path / "game.yaml").write_text("env: kuhn_poker\nrecipe: self_play\n")
    return load_config(tmp_path / "game.yaml", overrides).config


def test_games_that_teach_nothing_are_refused_before_anything_starts(tmp_path, agentrl):
    config = config_of(tmp_path, "rollout.group_size=3")
    with pytest.raises(
        ConfigError, match=r"rollout.group_size is 3.*with 2 seats a group needs 4.*algorithm=rae"
    ):
        check_matches(Matches(config.recipe.settings, ["north", "south"]), config)
    config = config_of(tmp_path, "rollout.group_size=1", "algorithm=rae")
    check_matches(Matches(config.recipe.settings, ["north", "south"]), config)
    with pytest.raises(ConfigError, match=r"leaves it only north.*or recipe=policy_gradient"):
        check_matches(Matches(config.recipe.settings, ["north"]), config)
    config = config_of(tmp_path, "recipe.seats=[west]")
    with pytest.raises(ConfigError, match=r"recipe.seats names west.*it plays north, south"):
        check_matches(Matches(config.recipe.settings, ["north", "south"]), config)
    done = agentrl(
        "train", "game.yaml", "env=guess_number", "run_dir=run", "trackers=[]", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "guess_number names no agents" in " ".join((done.stderr + done.stdout).split())


@pytest.mark.long
@pytest.mark.parametrize("roles", [True, False])
def test_self_play_gets_nearer_to_optimal_play(tmp_path, roles):
    train(
        EXAMPLE,
        f"algorithm.roles={roles}",
        "run_dir=run",
        "evaluation.tasks=0",
        "trackers=[]",
        cwd=tmp_path,
    )
    found = [row["exact/exploitability"] for row in rows_of(tmp_path / "run")]
    assert sum(found[-5:]) / 5 < 0.6 * found[0]
