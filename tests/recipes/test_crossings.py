"""Settings crossed in pairs: each is refused by one sentence that names them, or its run ends well
and can be resumed.

The factors are in `crossings.py`: recipe, engine, cluster, trainer, isolation, kind of environment,
tasks, reward, context, history, evaluation, tracker, staleness rule, algorithm, processing of
batches, sampling, update of weights, extra members. A row of one value each is a run of two steps,
which goes back to the checkpoint after the first and makes the second one again.

Pairs are tried on the config, and rows are run. CI has a share of both, without Ray, vLLM, FSDP and
DeepSpeed, and `make long` all of them: with AGENTRL_CROSSINGS=FOLDER it keeps the outcomes
there, and goes on where it was stopped. AGENTRL_SEED=N makes other rows.

On 25 November all pairs without what takes long to start were run, in 224 rows of recipes that play
and 64 of the others, and most of those with it. Each row ended well, or by the filter of groups.
What was wrong, and is mended: tasks that failed together for one reason ended in a traceback (a
reward without gold, the budget of filtered groups); a suite without the agents of `env.agents` was
refused in the middle; self-play of a program failed as an environment; engine=openai was refused
after the imitation; a resumed run evaluated what was not due; recordings were imitated without a
metric; sections that a recipe does not use were ignored without a word; algorithms with a surrogate
of their own could not be sent to ranks in processes; a relative run_dir was written where Ray had
been started; coroutines of environments in threads, whose caller had left, were never awaited.
"""

import asyncio
import json
import os
import shutil
import sys
import threading
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from agentrl.testing.judge_server import JudgeCall, JudgeReply, JudgeServer
from tests.covering import Combination, Coverage
from tests.recipes.crossings import (
    BASE_ROW,
    FACTORS,
    ONLY_AT_THE_START,
    PLAYED,
    STILL,
    Runs,
    Tally,
    blamed,
    cache_of,
    crossed,
    validated,
)

SEED = int(os.environ.get("AGENTRL_SEED", "1"))
FAR = {"vllm", "ray", "fsdp", "deepspeed"}
"""What takes long to start."""
SETTINGS = {
    "recipe": ("recipe",),
    "engine": ("engine",),
    "cluster": ("cluster",),
    "trainer": ("trainer",),
    "isolation": ("env.isolation",),
    "env": ("env", "recipe.demonstrations"),
    "tasks": ("tasks",),
    "reward": ("reward",),
    "context": ("rollout.context",),
    "history": ("model.history",),
    "evaluation": ("evaluation", "checkpoint.best"),
    "tracker": ("trackers",),
    "staleness": ("rollout.staleness_rule", "rollout.max_staleness"),
    "algorithm": ("algorithm",),
    "processing": ("batch_processing", "filter_zero_variance"),
    "sampling": ("rollout.sampling",),
    "weights": ("weights",),
    "members": ("rollout.extra_members",),
}
"""What a sentence may call the setting of a factor."""


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """The address of a judge."""

    def verdict(call: JudgeCall) -> JudgeReply:
        # By what is judged alone: a resumed run asks in another order, and each call has a random
        # key.
        level = zlib.crc32(json.dumps(call.data).encode()) % 7
        return JudgeReply.json(
            {"better": "first"} if '"better"' in call.user else {"levels": {"clear": level}}
        )

    loop, server = asyncio.new_event_loop(), JudgeServer(verdict)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    yield server.url
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module", autouse=True)
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where the plug-ins of the configs are found."""
    folder = tmp_path_factory.mktemp("parts")
    shutil.copy(Path(__file__).with_name("crossing_parts.py"), folder / "parts.py")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def runs(judge: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("crossings"), judge) as made:
        yield made


def crossing(recipes: tuple[str, ...], *, without: frozenset[str] = frozenset()) -> Coverage:
    """All pairs of these recipes; where the model does not play, only the recipe's own."""
    factors = {
        factor: [value for value in values if value not in without]
        for factor, values in FACTORS.items()
    }
    factors["recipe"] = list(recipes)

    def shows(pair: Combination) -> bool:
        return recipes is PLAYED or "recipe" in dict(pair)

    return Coverage(factors, seed=SEED, only=shows)


def told(tally: Tally, coverage: Coverage) -> str:
    lines = [f"{row}: {said}" for row, said in tally.wrong]
    return (
        f"seed {SEED}: {tally.accepted} runs accepted, {tally.ended} ended by a filter,"
        f" {len(tally.refused)} combinations refused, {len(tally.wrong)} wrong,"
        f" {len(coverage.open)} pairs open\n" + "\n".join(lines)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "most", [pytest.param(10, id="some"), pytest.param(None, marks=pytest.mark.long, id="all")]
)
def test_every_pair_of_settings_is_accepted_or_refused_by_a_sentence_that_names_them(
    most: int | None,
) -> None:
    coverage, outcome = (
        Coverage({name: list(values) for name, values in FACTORS.items()}, seed=SEED),
        cache_of(validated),
    )
    assert outcome(BASE_ROW).kind == "accepted"
    for _ in count() if most is None else range(most):
        if (row := coverage.row()) is None:
            return
        if outcome(row).kind == "accepted":
            coverage.accept(row)
            continue
        choices, refusal = blamed(row, outcome)
        assert refusal.kind == "refused", (choices, refusal.said)
        assert "\n" not in refusal.said, (choices, refusal.said)
        assert any(name in refusal.said for factor in choices for name in SETTINGS[factor]), (
            choices,
            refusal.said,
        )
        coverage.refuse(choices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipes", "most"),
    [
        pytest.param(PLAYED, 3, marks=pytest.mark.long, id="played"),
        pytest.param(STILL, 2, marks=pytest.mark.long, id="still"),
        pytest.param(STILL, 1, id="one that is still"),
    ],
)
def test_runs_of_crossing_settings_end_well_and_can_be_resumed(
    runs: Runs, tmp_path: Path, recipes: tuple[str, ...], most: int
) -> None:
    coverage = crossing(recipes, without=frozenset(FAR))
    tally = crossed(runs, coverage, tmp_path / "done.jsonl", most=most)
    print(told(tally, coverage))
    assert tally.accepted + tally.ended == most, told(tally, coverage)
    assert not tally.wrong, told(tally, coverage)


@pytest.mark.slow
def test_what_only_the_start_can_tell_is_refused_before_any_work(runs: Runs) -> None:
    for number, (choices, begins) in enumerate(ONLY_AT_THE_START):
        needed = {"algorithm": "archer"} if choices.get("recipe") == "archer" else {}
        needed |= {"tasks": "dataset"} if choices.get("recipe") == "self_play" else {}
        outcome = runs.tried({**BASE_ROW, **needed, **choices}, f"refused {number}")
        assert outcome.kind == "refused", (choices, outcome.said)
        assert begins in outcome.said
        assert "\n" not in outcome.said


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(
            {"evaluation": "ends"},
            marks=pytest.mark.long,
            id="a resumed run evaluates only what is due",
        ),
        pytest.param(
            {"recipe": "dpo", "evaluation": "ends"},
            id="a recipe names the sections that it does not use",
        ),
        pytest.param(
            {"env": "frozen opponent", "evaluation": "suite"},
            marks=pytest.mark.long,
            id="the policy plays a suite without the agents alone",
        ),
    ],
)
def test_what_once_was_wrong(
    runs: Runs, choices: dict[str, str], request: pytest.FixtureRequest
) -> None:
    outcome = runs.tried({**BASE_ROW, **choices}, request.node.callspec.id)
    assert outcome.kind == "accepted", outcome.said


@pytest.mark.long
@pytest.mark.parametrize("recipes", [PLAYED, STILL], ids=["played", "still"])
def test_all_pairs_end_well_and_can_be_resumed(
    runs: Runs, tmp_path: Path, recipes: tuple[str, ...]
) -> None:
    folder = Path(os.environ.get("AGENTRL_CROSSINGS", tmp_path))
    kind = "played" if recipes is PLAYED else "still"
    # What takes long to start comes last, in as few rows as there can be.
    coverage = crossing(recipes, without=frozenset(FAR))
    for part in ("near", "far"):
        tally = crossed(runs, coverage, folder / f"crossings-{SEED}-{kind}-{part}.jsonl")
        print(told(tally, coverage))
        assert not tally.wrong, told(tally, coverage)
        assert not coverage.open
        coverage = crossing(recipes)
        for choices, _ in tally.refused:
            coverage.refuse(choices)
        for row in tally.rows:
            coverage.accept(row)
