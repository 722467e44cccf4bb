"""What an engine answers is checked where it enters."""

import asyncio
import json
import math

import pytest

from agentrl.errors import CompletionError, EngineError
from agentrl.models.source import vocabulary_size
from agentrl.protocols import GenerateRequest, Prompt
from agentrl.rollout.answers import checked_completion
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.runner import Episode
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion, Task

REQUEST = GenerateRequest("e/0", (1, 2), SamplingParams())


def said(logprobs, ids=(5, 6)) -> Completion:
    return Completion(ids, logprobs, (0,) * len(ids), "stop")


@pytest.mark.parametrize(
    ("logprobs", "why"),
    [
        ((-1.0, math.nan), r"the logprob nan for token 1 \(6\), and 1 of 2"),
        ((0.5, -1.0), "the logprob 0.5 for token 0"),
        ((-1.0, 1e-3), "the logprob 0.001 for token 1"),
        ((-math.inf, -1.0), "the logprob -inf for token 0"),
        ((math.inf, math.nan), "and 2 of 2"),
    ],
)
def test_a_logprob_that_no_model_can_have_is_a_failure_of_the_engine(logprobs, why):
    with pytest.raises(EngineError, match=why):
        checked_completion(said(logprobs), REQUEST)


def test_rounding_above_0_is_0_and_the_rest_stays_as_it_is():
    assert checked_completion(said((1e-7, -1.0)), REQUEST).logprobs.tolist() == [0.0, -1.0]
    sound = said((-0.0, -1e30))
    assert checked_completion(sound, REQUEST) is sound


def test_an_id_that_the_model_has_no_row_for_is_a_failure_of_the_engine():
    assert checked_completion(said((-1.0, -1.0), (0, 6)), REQUEST, 7).token_ids.tolist() == [0, 6]
    with pytest.raises(
        EngineError, match="answered e/0 with 7 as token 1, which is no token's id: the model has 7"
    ):
        checked_completion(said((-1.0, -1.0), (0, 7)), REQUEST, 7)


def test_a_model_says_how_many_ids_it_has(tmp_path, tiny_model_dir):
    assert (
        vocabulary_size(tiny_model_dir)
        == json.loads((tiny_model_dir / "config.json").read_text())["vocab_size"]
    )
    assert vocabulary_size(tmp_path) is None
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 11}}')
    assert vocabulary_size(tmp_path) == 11


@pytest.mark.parametrize("ids", [(True, False), (1.5, 2.0), ("a", "b"), (None, 1)])
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(CompletionError, match="the tokens of a completion are ids"):
        said((-1.0, -1.0), ids)


def test_one_logprob_too_few_and_other_answers_are_failures_of_the_engine_in_an_episode():
    class Junk:
        max_context = 100

        def __init__(self, answer):
            self.answer = answer

        async def generate(self, request):
            return self.answer()

    for answer in (
        lambda: said((-1.0,)),
        lambda: said((math.nan, 0.0)),
        lambda: said((0.0, 0.0), (-1, 2)),
        dict,
    ):
        policy = EnginePolicy(Junk(answer), SamplingParams(), 10.0)
        episode = Episode("e", Task("env", 0), 0)
        with pytest.raises(EngineError) as failed:
            asyncio.run(policy.sample(episode, 0, Prompt(ints((1, 2)), ints((1, 2)), False)))
        assert failed.value.layer == "engine"
