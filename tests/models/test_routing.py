"""Which experts engine and trainer choose, and how often they differ."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.batch import TrainBatch, TrainingSample, collate, to_samples
from agentrl.engines.local import LocalEngine
from agentrl.models.routing import differing
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.trainers import LOSS
from agentrl.tokens.arrays import ints
from agentrl.tokens.expert_choices import UNKNOWN, ChosenExperts, ExpertChoices, read_choices
from agentrl.trainers.local import LocalTrainer
from agentrl.trajectory import Completion, Task, Terminated, Trajectory, Turn
from tests.model_families import make_model

LAYERS, CHOSEN = 2, 2
"""Of the tiny mixture: each layer chooses two of four experts."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    make_model("Qwen3-MoE", folder)
    return folder


@pytest.fixture(scope="module")
def played(mixture: Path) -> list[tuple[GenerateRequest, Completion]]:
    """Several prompts at once, of lengths that differ, and what was sampled after them."""
    asked = [
        GenerateRequest(
            f"r{n}",
            ints([30 + n, *range(40, 50 + 7 * n)]),
            SamplingParams(max_tokens=6),
            seed=n,
            keep_experts=n < 3,
        )
        for n in range(4)
    ]

    async def sampled() -> list[Completion]:
        async with LocalEngine(
            LocalEngine.Config(max_context=256, device="cpu"), mixture
        ) as engine:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(engine.generate(request)) for request in asked]
            return [answer.result() for answer in answers]

    return list(zip(asked, asyncio.run(sampled()), strict=True))


def trained_on(mixture: Path, batch: TrainBatch, **settings: Any) -> dict[str, float]:
    """The metrics of a step."""

    async def metrics() -> dict[str, float]:
        config = LocalTrainer.Config(device="cpu", **settings)
        async with LocalTrainer(config, mixture, total_steps=1) as trainer:
            return dict(await trainer.step(batch, LOSS, float(batch.num_loss_tokens)))

    return asyncio.run(metrics())


def batch_of(played: list[tuple[GenerateRequest, Completion]]) -> TrainBatch:
    turns = [Turn(request.prompt_ids, completion, 0.0, {}) for request, completion in played]
    tasks = [
        Trajectory(f"t{n}", Task("env", n), (turn,), Terminated()) for n, turn in enumerate(turns)
    ]
    return collate(
        sample for n, trajectory in enumerate(tasks) for sample in to_samples(trajectory, 1.0 - n)
    )


def test_the_share_that_differs_does_not_depend_on_the_order_of_experts() -> None:
    mine = torch.tensor([[0, 1], [0, 1], [2, 3]])
    other = torch.tensor([[1, 0], [3, 1], [0, 1]])
    assert differing(mine, other).tolist() == [0.0, 0.5, 1.0]


def test_an_engine_reports_the_experts_that_the_routers_like_best(
    mixture: Path, played: list[tuple[GenerateRequest, Completion]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    for request, completion in played[:3]:
        ids = np.append(request.prompt_ids, completion.token_ids)
        with torch.no_grad():
            routers = model(
                torch.tensor(ids[None], dtype=torch.int64), output_router_logits=True
            ).router_logits
        liked_TLK = np.stack(
            [one_SE[:-1].topk(CHOSEN).indices.sort().values.numpy() for one_SE in routers], axis=1
        )
        assert completion.experts is not None
        found_TLK = np.sort(read_choices([completion.experts], [len(ids) - 1]))
        np.testing.assert_array_equal(found_TLK[:, 0], liked_TLK[:, 0])
        # The last layer computes those that predict a sampled token.
        last_TK, first = found_TLK[:, 1], len(request.prompt_ids) - 1
        np.testing.assert_array_equal(last_TK[first:], liked_TLK[first:, 1])
        assert (last_TK[: first - 1] == UNKNOWN).all()
    assert played[3][1].experts is None, "its request did not ask for them"


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_trainer_counts_the_experts_that_the_engine_did_not_choose(
    mixture: Path, played: list[tuple[GenerateRequest, Completion]], minibatches: int
) -> None:
    settings = {"minibatches": minibatches, "routing": "compare"}
    metrics = trained_on(mixture, batch_of(played), **settings)
    # Those of the fourth are unknown.
    tokens = sum(len(completion.token_ids) for _, completion in played[:3])
    assert metrics["routing_difference"] == 0
    assert metrics["routing_known"] == pytest.approx(tokens / (tokens + 6))
    (request, completion), *others = played
    experts = read_choices([completion.experts], [len(request.prompt_ids) + 5])
    assert experts is not None
    predictor_LK = experts[len(request.prompt_ids) - 1]  # of the first sampled token
    predictor_LK[0] = [expert for expert in range(4) if expert not in predictor_LK[0]]
    changed = [(request, replace(completion, experts=ExpertChoices.of(0, experts))), *others]
    metrics = trained_on(mixture, batch_of(changed), **settings)
    assert metrics["routing_difference"] == pytest.approx(0.5 / tokens)


def test_without_reports_of_an_engine_nothing_is_compared(
    mixture: Path, played: list[tuple[GenerateRequest, Completion]]
) -> None:
    silent = [(request, replace(completion, experts=None)) for request, completion in played]
    metrics = trained_on(mixture, batch_of(silent), routing="compare")
    assert metrics["routing_known"] == 0
    assert "routing_difference" not in metrics


def choices(start: int, *experts: int) -> ExpertChoices:
    """Of tokens of a model with one layer that chooses one expert."""
    return ExpertChoices.of(start, np.array(experts, np.uint8)[:, None, None])


def known(sample: TrainingSample) -> list[int]:
    found = read_choices([sample.experts], [len(sample.token_ids)])
    assert found is not None
    return found[:, 0, 0].tolist()


def answer(*ids: int, experts: ExpertChoices | None = None) -> Completion:
    return Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop", experts=experts)


def test_experts_stay_beside_their_tokens() -> None:
    turns = (
        Turn((1, 2), answer(5, 6, experts=choices(0, 10, 11, 12)), 0.0, {}),
        # The engine has computed the last token of the answer, and a part of the first turn again.
        Turn((3,), answer(7, experts=choices(2, 92, 13, 14)), 0.0, {}),
        # A branch of the first turn, of which the engine knows all but the new tokens.
        Turn((1, 2, 5, 6, 8), answer(9, experts=choices(3, 23, 24)), 0.0, {}, forked=True),
    )
    samples = to_samples(Trajectory("t", Task("env", 0), turns, Terminated()), 1.0)
    assert [known(sample) for sample in samples] == [
        [10, 11, 12, 13, 14, UNKNOWN],
        [10, 11, 12, 23, 24, UNKNOWN],
    ]
    one, other = samples
    batch = collate([one, other, replace(one, experts=None)])
    assert list(batch.experts_M) == [one.experts, other.experts, None]
    assert list(batch.ordered([2, 0]).experts_M) == [None, one.experts]
    assert [list(part.experts_M) for part in batch.split([1, 2])] == [
        [one.experts],
        [other.experts, None],
    ]
    again = TrainBatch.joined(batch.split([1, 2]))
    assert list(again.experts_M) == list(batch.experts_M)
    assert list(batch.without_experts().experts_M) == [None] * 3


class Elsewhere:
    """Choices that another process holds, or has lost."""

    def __init__(self, chosen: ChosenExperts | None) -> None:
        self.chosen = chosen

    def __call__(self) -> ChosenExperts | None:
        return self.chosen


def test_what_is_held_elsewhere_is_fetched_when_it_is_read() -> None:
    here = choices(1, 10, 11)
    there = here.held(Elsewhere)
    assert isinstance(there.spans[0].chosen, Elsewhere)
    assert there.held(lambda chosen: Elsewhere(None)) == there, "it is not taken again"
    assert np.array_equal(read_choices([there], [4]), read_choices([here], [4]))
    lost = here.held(lambda chosen: Elsewhere(None))
    assert read_choices([lost], [4]) is None
    found = read_choices([lost, here.until(2), None], [2, 3, 1])
    assert found is not None
    assert found[:, 0, 0].tolist() == [-1, -1, -1, 10, -1, -1]
    other = ExpertChoices.of(0, np.zeros((2, 3, 1), np.uint8))
    with pytest.raises(ValueError, match="they serve different models"):
        read_choices([here, other], [3, 3])
