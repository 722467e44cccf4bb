"""The settings of the rollouts: deadlines that grow with the answers."""

import pytest
from pydantic import ValidationError

from agentrl.rollout.config import Deadlines, RolloutConfig


def test_long_answers_get_more_time_and_a_deadline_that_is_given_stays() -> None:
    short, long = (
        RolloutConfig(sampling={"max_tokens": n}, budget={"turns": 10}).deadlines
        for n in (1, 10_000)
    )
    assert (short.generate, short.episode, short.group, short.stall) == (120.2, 902, 7200, 1200)
    assert (long.generate, long.episode, long.group, long.stall) == (2120, 20_900, 41_800, 4240)
    given = RolloutConfig(
        sampling={"max_tokens": 10_000}, deadlines={"generate": 300, "stall": 700}
    ).deadlines
    assert (given.generate, given.stall) == (300, 700)


def test_deadlines_that_were_chosen_are_the_same_when_a_config_is_read_back() -> None:
    config = RolloutConfig(sampling={"max_tokens": 10_000})
    assert RolloutConfig.model_validate(config.model_dump()) == config
    assert (
        RolloutConfig(sampling={"max_tokens": 9}, deadlines=config.deadlines).deadlines
        == config.deadlines
    )


def test_a_stall_that_is_shorter_than_the_answers_take_is_refused() -> None:
    assert Deadlines(stall=200)
    with pytest.raises(ValidationError, match="the longest is 2120 s"):
        RolloutConfig(sampling={"max_tokens": 10_000}, deadlines={"stall": 200})
