"""Which experts engine and trainer choose, and how often they differ."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.arrays import Ragged, ints
from agentrl.batch import TrainBatch, collate, to_samples
from agentrl.engines.local import LocalEngine
from agentrl.models.routing import differing
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.trainers import LOSS
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
            ints(range(40, 50 + 7 * n)),
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


def trained_on(mixture: Path, batch: TrainBatch, **settings: int) -> dict[str, float]:
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
    mine = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    other = torch.tensor([[[1, 0], [2, 3]], [[1, 0], [3, 1]], [[2, 3], [0, 1]]])
    assert differing(mine, other).tolist() == [0.0, 0.25, 1.0]


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
        before = slice(len(request.prompt_ids) - 1, -1)
        liked = np.stack(
            [one_SE[before].topk(CHOSEN).indices.sort().values.numpy() for one_SE in routers],
            axis=1,
        )
        found = completion.experts_of_each.padded(-1).reshape(-1, LAYERS, CHOSEN)
        np.testing.assert_array_equal(np.sort(found), liked)
    assert played[3][1].experts is None, "its request did not ask for them"


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_trainer_counts_the_experts_that_the_engine_did_not_choose(
    mixture: Path, played: list[tuple[GenerateRequest, Completion]], minibatches: int
) -> None:
    assert trained_on(mixture, batch_of(played), minibatches=minibatches)["routing_difference"] == 0
    (request, completion), *others = played
    experts = completion.experts_of_each.padded(-1)
    # In the first layer.
    experts[0, :CHOSEN] = [expert for expert in range(4) if expert not in experts[0, :CHOSEN]]
    changed = [(request, replace(completion, experts=Ragged.of(experts))), *others]
    # Those of the fourth are unknown.
    tokens = sum(len(completion.token_ids) for _, completion in played[:3])
    metrics = trained_on(mixture, batch_of(changed), minibatches=minibatches)
    assert metrics["routing_difference"] == pytest.approx(0.5 / tokens)


def test_without_reports_of_an_engine_there_is_no_such_metric(
    mixture: Path, played: list[tuple[GenerateRequest, Completion]]
) -> None:
    silent = [(request, replace(completion, experts=None)) for request, completion in played]
    assert "routing_difference" not in trained_on(mixture, batch_of(silent))


def test_experts_stay_beside_their_tokens() -> None:
    known = Completion((5, 6), (-1.0, -1.0), (0, 0), "stop", experts=Ragged.of([(0, 1), (2, 3)]))
    unknown = Completion((7,), (-1.0,), (0,), "stop")
    turns = tuple(Turn((1, 2), completion, 0.0, {}) for completion in (known, unknown))
    (sample,) = to_samples(Trajectory("t", Task("env", 0), turns, Terminated()), 1.0)
    assert sample.experts == Ragged.of([(), (), (0, 1), (2, 3), (), (), ()])
    batch = collate([sample, replace(sample, experts=None)])
    assert batch.experts_N == Ragged.of([(0, 1), (2, 3), (), (), (), ()])
    assert [part.experts_N for part in batch.split([1, 1])] == [
        Ragged.of([(0, 1), (2, 3), ()]),
        Ragged.empty(3),
    ]
    assert batch.ordered([1, 0]).experts_N == Ragged.of([(), (), (), (0, 1), (2, 3), ()])
    assert TrainBatch.joined(batch.split([1, 1])).experts_N == batch.experts_N
    loss_S = batch.loss_mask_S.copy()
    loss_S[2], loss_S[4] = False, True
    assert batch.with_loss_on(loss_S).experts_N == Ragged.of([(2, 3), (), (), (), (), ()])
    with pytest.raises(ValueError, match="as many rows of experts, got 1"):
        replace(known, experts=Ragged.of([(0, 1)]))
