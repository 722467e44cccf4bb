"""The metric of bias counts cut episodes as what they are: longer than they have been played."""

import random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.accounts import LengthBias
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.durations import Durations
from agentrl.simulate.config import SimulationConfig
from agentrl.simulate.latency import Lognormal, Uniform
from agentrl.simulate.world import World

lengths = st.floats(0.01, 1e4)


def durations(ended, cut=()) -> Durations:
    found = Durations()
    for length in ended:
        found.add(length)
    for length in cut:
        found.cut(length)
    return found


def test_the_mean_with_one_length_cut_is_that_of_kaplan_and_meier_by_hand():
    """Of four, one ends at 1 and 3/4 are left; one of these is cut at 2; one of the other two ends
    at 3, one at 4.
    """
    assert durations([1, 3, 4], [2]).mean() == pytest.approx(1 + 3 / 4 * 2 + 3 / 8 * 1)


@given(st.lists(lengths, min_size=1, max_size=30), st.booleans())
def test_with_nothing_cut_it_is_the_mean(drawn, zero):
    drawn = [*drawn, *([0.0] if zero else [])]
    assert durations(drawn).mean() == pytest.approx(fmean(drawn))
    assert durations(drawn, [0.0]).mean() == pytest.approx(fmean(drawn)), (
        "cut at once, it says nothing"
    )


@given(
    st.lists(lengths, min_size=2, max_size=30),
    st.lists(lengths, min_size=1, max_size=30),
    st.floats(0.1, 10),
)
def test_the_mean_is_finite_positive_and_in_the_unit_of_the_lengths(ended, cut, unit):
    mean = durations(ended, cut).mean()
    assert 0 < mean < float("inf")
    assert durations(
        [unit * one for one in ended], [unit * one for one in cut]
    ).mean() == pytest.approx(unit * mean, rel=0.05)


def test_none_that_ended_has_no_mean():
    assert durations([]).mean() == durations([], [1.0, 2.0]).mean() == 0.0
    assert LengthBias().metrics() == {"bias/seconds": 1.0, "bias/tokens": 1.0}


@pytest.mark.parametrize(("kept", "cut"), [(8, 1), (8, 4), (8, 8), (4, 12), (1, 24)])
def test_the_metric_is_the_truth_for_memoryless_lengths_however_many_are_cut(kept, cut):
    """The mean of the shortest `kept` of n over that of all; with 24 of 25 cut it is 0.04, and was
    told as 1.0.
    """
    rng, bias, trained = np.random.default_rng(1), Durations(), []
    for _ in range(400):
        drawn = np.sort(rng.exponential(30.0, kept + cut))
        trained += drawn[:kept].tolist()
        for length in drawn[:kept]:
            bias.add(float(length))
        for _ in range(cut):
            bias.cut(float(drawn[kept - 1]))
    assert fmean(trained) / bias.mean() == pytest.approx(fmean(trained) / 30.0, rel=0.15)


def shortest(latency, kept: int, cut: int) -> float:
    """The mean of the shortest `kept` of as many lengths as are played, over the mean of all."""
    rng = random.Random(2)
    drawn = np.sort(
        [[latency.sample(rng) for _ in range(kept + cut)] for _ in range(20_000 // (kept + cut))]
    )
    return float(drawn[:, :kept].mean() / drawn.mean())


@pytest.mark.parametrize(
    ("latency", "cut", "within"),
    [
        (Lognormal(median=30, sigma=0.5), 1, 0.05),
        (Lognormal(median=30, sigma=0.5), 8, 0.25),
        (Lognormal(median=30, sigma=1.0), 4, 0.5),
        (Uniform(low=0.1, high=60), 2, 0.1),
    ],
)
def test_the_schedulers_metric_is_near_the_truth_with_surplus_members(latency, cut, within):
    """Each group of 8 is complete without its slowest members, and these are cancelled."""
    config = RolloutConfig(groups_per_step=4, group_size=8, extra_members=cut, max_staleness=1)
    simulation = SimulationConfig(episode_seconds=latency)
    report = World(config, simulation, steps=30, seed=3).run()
    fates = report.episode_fates
    assert fates.cancelled == pytest.approx(fates.total * cut / (8 + cut), rel=0.05)
    truth = shortest(latency, 8, cut)
    assert report.metrics["bias/seconds"] == pytest.approx(truth, rel=within)
    assert truth < 0.95
