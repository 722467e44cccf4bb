"""Settings of estimators in pairs: what a config accepts is unbiased, or biased as docs/oracles.md
says, and bounded.

Every row is a config with a value of each factor in `crossings.py`. All batches of its step are
enumerated.
"""

import math
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.algorithms.advantages import Comparison, compared_by_turn, returns_to_go
from agentrl.algorithms.dpo import OnlineDpo
from agentrl.algorithms.losses import by_sample
from agentrl.algorithms.policy_loss import PolicyAlgorithm
from agentrl.algorithms.rae import RoleAdvantage
from agentrl.algorithms.sft import RejectionSampling
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.oracles.estimators import cosine
from agentrl.oracles.exact_steps import ExactBatch, ExactStep
from agentrl.protocols import LossTokens
from tests.algorithms.crossings import (
    BIASES,
    FACTORS,
    Row,
    biases_of,
    configured,
    first,
    smallest_refused,
    step_of,
    unbiased,
    value,
    without,
    write_base,
)
from tests.algorithms.true_gradients import Policies, spans_of, wanted
from tests.covering import Coverage
from tests.tiers import evenly

PAGE = Path(__file__).parents[2] / "docs" / "oracles.md"
COLUMNS = ("stopping", "bandit", "corridor", "mixture")
EXACT = 3e-5
"""How far a gradient may be from the true one, relative to it: advantages are in float32."""
LEAST = 0.02
"""The share of an environment's gradient that has to be left, with the divisor of the loss taken
out.
"""
ANYWHERE = 90.0
"""What may turn the gradient further than this may also turn it round."""
SEED = int(os.environ.get("CROSSINGS_SEED", "0"))


@dataclass(frozen=True, slots=True)
class Taken:
    """The step of a row, on average, and what it should be."""

    config: RunConfig
    step: ExactStep
    policies: Policies
    batches: Sequence[ExactBatch]
    found_P: Tensor
    wanted_P: Tensor

    @property
    def off(self) -> float:
        """The distance of both, relative to the true one."""
        return float((self.found_P - self.wanted_P).norm() / self.wanted_P.norm().clamp(min=1e-9))

    @property
    def teaches(self) -> bool:
        """Whether there is a gradient to follow, and something is trained on."""
        return bool(self.batches) and float(self.wanted_P.norm()) > 1e-9

    @property
    def angle(self) -> float:
        """Between both, in degrees."""
        return angle(self.found_P, self.wanted_P)


def angle(found_P: Tensor, wanted_P: Tensor) -> float:
    return math.degrees(math.acos(min(1.0, max(-1.0, cosine(found_P, wanted_P)))))


def taken(row: Row, base: Path) -> Taken:
    config = configured(row, base)
    step, sampling = step_of(config), config.rollout.sampling
    moved = value(row, "played by") == "an older policy" and config.rollout.max_staleness > 0
    trained_P = step.oracle.logits(1)
    played_P = trained_P + 0.3 * step.oracle.logits(2) if moved else trained_P
    step.oracle.temperature = sampling.temperature
    if sampling.truncated:
        step.oracle.kept_P = step.oracle.left(played_P, sampling)
    policies = Policies(trained_P, played_P, step.oracle.logits(3))
    batches = list(step.batches(trained_P, played_P, policies.reference_P))
    found_P = step.gradient(batches, trained_P)
    return Taken(config, step, policies, batches, found_P, wanted(step, policies, batches))


# What is wrong with a row


def wrong(row: Row, base: Path, most: Mapping[str, float], alone: Sequence[str]) -> Iterator[str]:
    """What must not be of an accepted row, in words. `alone`: its biases that are tried without the
    others.
    """
    whole = taken(row, base)
    yield from out_of_bounds(whole)
    if all(most[name] < ANYWHERE for name in biases_of(row)):
        yield from without_signal(whole)
    for name in alone:
        one = without(row, [other for other in biases_of(row) if other != name])
        turned = taken(one, base)
        if biases_of(one) == [name] and turned.teaches and turned.angle > most[name]:
            yield (
                f"{name} turns the gradient by {turned.angle:.1f} degrees, and not {most[name]:g},"
                f" in {short(one)}"
            )
    for exact in unbiased(row):
        found = taken(exact, base)
        if not found.off < EXACT:
            yield (
                f"{found.off:.2g} of the gradient is wrong ({found.angle:.1f} degrees) in"
                f" {short(exact)}"
            )


def out_of_bounds(whole: Taken) -> Iterator[str]:
    for one in whole.batches:
        largest = float(np.abs(one.batch.advantages_N).max(initial=0.0))
        if not largest <= (most := bound(whole, one)) * (1 + 1e-4):  # also if it is not a number
            yield f"an advantage of {largest:.3g}, where {most:.3g} is the most"
            return


def bound(whole: Taken, one: ExactBatch) -> float:
    """The largest advantage that a batch can have.

    Of n numbers that are divided by their own root mean square, none is larger than sqrt(n).
    Without that, two returns differ by no more than their span, and an advantage says how two of
    them differ.
    """
    step, processing = whole.step, whole.config.batch_processing
    returns, costs = spans_of(step, whole.policies)
    span = returns + processing.length_penalty
    turns = sum(len(trajectory.turns) for group in one.groups for trajectory in group.trajectories)
    if processing.normalize != "group" or hasattr(step.algorithm, "normalized"):
        tokens = getattr(step.algorithm.config, "statistics", "") == "tokens"
        return math.sqrt(one.batch.num_loss_tokens if tokens else turns) + costs
    if getattr(step.algorithm.config, "whiten", False):
        return math.sqrt(one.batch.num_loss_tokens)
    return (
        max(
            own_bound(algorithm.config, span, turns)
            for algorithm in (step.algorithm, *step.by_env.values())
        )
        + costs
    )


def own_bound(own: Any, span: float, turns: int) -> float:
    """That of an algorithm alone."""
    if isinstance(own, RejectionSampling.Config | OnlineDpo.Config):
        return 1.0
    compared = math.sqrt(turns) if getattr(own, "advantage", "") == "group_std" else span
    baseline = 0.3 if isinstance(own, RoleAdvantage.Config) else 0.0
    return compared * (1 + getattr(own, "step_weight", 0.0)) + baseline


def without_signal(whole: Taken) -> Iterator[str]:
    """An environment whose gradient is lost, or turned round."""
    if not whole.batches:
        yield "nothing is ever trained on"
        return
    size = sum(one.chance * one.divisor for one in whole.batches) / sum(
        one.chance for one in whole.batches
    )
    for share in whole.step.shares:
        own_P = whole.step.states_of(share)
        found_P, wanted_P = whole.found_P[own_P] * size, whole.wanted_P[own_P]
        if wanted_P.norm() > 1e-9 and not found_P @ wanted_P > LEAST * wanted_P @ wanted_P:
            share_found = float(found_P @ wanted_P / (wanted_P @ wanted_P))
            yield f"of the gradient of {share.env}, {share_found:.3g} is left"


def short(row: Row) -> dict[str, str]:
    return {factor: chosen for factor, chosen in row.items() if chosen != first(factor)}


def figures() -> Mapping[str, Sequence[float]]:
    """The table of docs/oracles.md: by how many degrees each bias turns the gradient alone, and at
    most.
    """
    rows = re.findall(r"^\| (`.*?) \|((?: [\d.]+ \|){5})", PAGE.read_text(), re.MULTILINE)
    return {name: [float(cell) for cell in cells.split("|")[:-1]] for name, cells in rows}


def most() -> Mapping[str, float]:
    return {name: cells[-1] for name, cells in figures().items()}


# What settings do together


@dataclass(slots=True)
class Tried:
    """Rows that were tried: how many are accepted, what is refused, and what is wrong."""

    accepted: int = 0
    refused: list[tuple[Row, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.accepted} accepted, {len(self.refused)} refused, {len(self.wrong)} wrong"


def tried(base: Path, *, rows: int, strength: int = 2, each: int | None = None) -> Tried:
    """Try rows until all combinations of `strength` values have been in one, or so many are
    accepted.

    `each`: how many of a row's biases are tried alone, by default all.
    """
    coverage = Coverage(
        {factor: list(values) for factor, values in FACTORS.items()}, seed=SEED, strength=strength
    )
    for choices in (*TOO_MANY, NO_VERDICTS):
        coverage.refuse(choices)
    found, limits, rng = Tried(), most(), random.Random(SEED)
    while found.accepted < rows and (row := coverage.row()) is not None:
        chosen = {factor: str(name) for factor, name in row.items()}
        try:
            configured(chosen, base)
        except ConfigError:
            part, why = smallest_refused(chosen, base)
            found.refused.append((part, why))
            coverage.refuse(part)
            continue
        coverage.accept(row)
        found.accepted += 1
        biases = biases_of(chosen)
        alone = biases if each is None else rng.sample(biases, min(each, len(biases)))
        found.wrong += [f"{what} <- {short(chosen)}" for what in wrong(chosen, base, limits, alone)]
    print(f"CROSSINGS_SEED={SEED}: {found}")
    return found


TOO_MANY: Sequence[Row] = (
    *({"env": env, "groups": "2"} for env in FACTORS["env"] if env not in COLUMNS[:3]),
    {"members": "3", "groups": "2"},
)
"""Steps of more batches than can be enumerated in a second."""
NO_VERDICTS: Row = {"algorithm": "rejection", "keep": "default", "filter": "zero variance"}
"""`keep=success` imitates nothing here, as the problems have no verdicts, and the filter then
leaves no group.
"""


def unnamed(part: Row, why: str) -> list[str]:
    """The factors of a refused part of which its reason says nothing."""
    keys = {
        factor: [line.partition("=")[0] for line in FACTORS[factor][chosen]]
        for factor, chosen in part.items()
    }
    return [
        factor
        for factor, own in keys.items()
        if factor != "algorithm" and own and not any(key.rpartition(".")[2] in why for key in own)
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("crossings"))


@pytest.mark.long
def test_two_combinations_of_settings_are_refused_by_name_or_follow_the_gradient(
    base: Path,
) -> None:
    found = tried(base, rows=2, each=0)
    assert found.wrong == []
    assert [(part, why) for part, why in found.refused if unnamed(part, why)] == []
    assert found.accepted == 2


@pytest.mark.long
@pytest.mark.parametrize("strength", [2, 3])
def test_all_pairs_of_settings_are_refused_by_name_or_follow_the_gradient(
    base: Path, strength: int
) -> None:
    """Of triples, a few hundred rows."""
    found = tried(base, rows=300, strength=strength)
    assert found.wrong == []
    assert [(part, why) for part, why in found.refused if unnamed(part, why)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", evenly(BIASES, 7))
def test_the_docs_say_how_far_each_bias_turns_the_gradient(name: str, base: Path) -> None:
    angles = []
    for column in COLUMNS:
        row = {**BIASES[name].alone, "env": column}
        if column == "mixture":
            row.pop("groups", None)
        assert biases_of(row) in ([name], [])
        angles.append(taken(row, base).angle)
    assert list(figures()[name][:-1]) == pytest.approx(angles, abs=0.06)


# The test can fail


def divided_by_another_spread(
    turn_rewards_G: Sequence[Sequence[float]],
    with_what: Comparison,
    gamma: float,
    baseline: Any,
    *_: str,
) -> list[list[float]]:
    """Returns to go divided by the spread of whole returns, as they once were."""
    left_G = compared_by_turn(turn_rewards_G, "group_mean", gamma, baseline)
    spread = float(np.std([returns_to_go(rewards, gamma)[0] for rewards in turn_rewards_G])) + 1e-6
    return [[a / spread for a in left] for left in left_G]


def one_advantage_of_a_sample(
    self: PolicyAlgorithm, logprobs_N: Tensor, tokens: LossTokens
) -> Tensor:
    """The gradient of a sample's mean ratio, whatever its turns' advantages are."""
    ratio_N = by_sample(logprobs_N - tokens.old_logprobs_N, tokens.segments_N, "mean").exp()
    return ratio_N * tokens.advantages_N


@pytest.mark.parametrize(
    ("row", "planted", "told"),
    [
        (
            {"algorithm": "grpo", "credit": "to go"},
            ("agentrl.algorithms.grpo.compared_by_turn", divided_by_another_spread),
            "an advantage of",
        ),
        (
            {"algorithm": "gspo", "advantage": "leave_one_out", "credit": "to go"},
            ("agentrl.algorithms.policy_loss.PolicyAlgorithm.surrogate", one_advantage_of_a_sample),
            "of the gradient is wrong",
        ),
        (
            {
                "algorithm": "grpo",
                "advantage": "group_mean",
                "credit": "to go",
                "filter": "zero variance",
            },
            (
                "agentrl.algorithms.batch_processing.BatchProcessing.teaches",
                lambda self, group: group.has_signal,
            ),
            "of the gradient is wrong",
        ),
        (
            {"algorithm": "rloo", "staleness": "1"},
            (
                "agentrl.algorithms.losses.importance",
                lambda tokens, *rest: torch.ones_like(tokens.old_logprobs_N),
            ),
            "of the gradient is wrong",
        ),
    ],
    ids=[
        "another spread",
        "one advantage of a sample",
        "a filter by whole rewards",
        "no importance weights",
    ],
)
def test_a_defect_that_is_planted_is_found(
    row: Row, planted: tuple[str, Any], told: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = dict.fromkeys(BIASES, 180.0)
    row = {"normalizer": "1.0", **row}
    assert list(wrong(row, base, limits, [])) == []
    monkeypatch.setattr(*planted)
    assert any(told in what for what in wrong(row, base, limits, []))
