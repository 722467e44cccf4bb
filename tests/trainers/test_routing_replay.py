"""Training with the experts that the engine chose: its logprobs, its gradients, its metrics."""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from agentrl.batch import TrainBatch, TrainingSample, collate, to_samples
from agentrl.engines.local import LocalEngine
from agentrl.engines.packed_model import PackedModel
from agentrl.errors import ConfigError, TrainingError
from agentrl.models.routing import layers_with_experts, take_choices
from agentrl.protocols import GenerateRequest
from agentrl.rollout.continuation import joined, rest_of
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.trainers import LOSS
from agentrl.tokens.arrays import IntArray, floats, ints
from agentrl.tokens.expert_choices import ExpertChoices, read_choices
from agentrl.trainers.compute.attention import ATTENTION
from agentrl.trainers.compute.forward import (
    RoutedLayers,
    compute_logprobs_in,
    scaling_of,
    to_device,
    token_logprobs,
)
from agentrl.trainers.compute.recomputation import recompute_blocks
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.packing import micro_batches
from agentrl.trajectory import Completion, Task, Terminated, Trajectory, Truncated, Turn
from tests.model_families import FAMILIES, make_model
from tests.tiers import evenly

CLOSE = 1e-5
"""Nats between engine and trainer that choose the same experts, both in float32."""
FAST = ("Qwen3-MoE", "Mixtral", "gpt-oss", "DeepSeek-V3")
MIXTURES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name, family in FAMILIES.items()
    if family.mixture
]


class Perturbed(TorchFunctionMode):
    """In its block, routers choose their experts by other scores than those that weigh them: with
    noise for each expert of each token, or for each expert alone.
    """

    def __init__(self, generator: torch.Generator, *, of_tokens: bool) -> None:
        super().__init__()
        self._generator = generator
        self._of_tokens = of_tokens
        self._of_experts_E = torch.randn(4, generator=generator)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        is_choice = func in (torch.topk, torch.Tensor.topk)
        if not is_choice or args[0].shape[1:] != (4,):  # each layer has four experts
            return output
        scores_SE = args[0].nan_to_num(neginf=0.0)  # also experts of groups that are left out
        noise = self._of_experts_E
        if self._of_tokens:
            noise = torch.randn(scores_SE.shape, generator=self._generator)
        scale = scores_SE.std(1, keepdim=True)
        chosen = (scores_SE + scale * noise).topk(output[1].shape[1]).indices
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))


@pytest.fixture
def perturb(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Perturb the routers of engines from now on: by `tokens`, or by `experts`."""
    step, generator = PackedModel.step, torch.Generator().manual_seed(0)

    def perturb(by: str) -> None:
        mode = Perturbed(generator, of_tokens=by == "tokens")

        def perturbed_step(self: PackedModel, rows: Any) -> Any:
            with mode:
                return step(self, rows)

        monkeypatch.setattr(PackedModel, "step", perturbed_step)

    return perturb


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("mixtures") / "model"
            make_model(name, made[name])
        return made[name]

    return folder


def asked(
    number: int, turn: int, prompt: Sequence[int] | IntArray, known: int = 0
) -> GenerateRequest:
    return GenerateRequest(
        f"{number}/{turn}",
        ints(prompt),
        SamplingParams(max_tokens=5 + number),
        seed=100 * number + turn,
        session=str(number),
        known=known,
        keep_experts=True,
    )


async def episode(engine: LocalEngine, number: int, beginnings: int) -> Trajectory:
    """Two turns, and a reply that no engine has seen. There are so many `beginnings`: an engine and
    a trainer compute each prompt once.
    """
    first = ints([number % beginnings, *range(40, 70)])
    answer = await engine.generate(asked(number, 0, first))
    turns = [Turn(first, answer, 0.0, {})]
    reply = ints(range(50, 55))
    prompt = np.concatenate([first, answer.token_ids, reply])
    known = len(first) + len(answer.token_ids)
    turns.append(
        Turn(reply, await engine.generate(asked(number, 1, prompt, known)), float(number), {})
    )
    return Trajectory(
        f"t{number}", Task("env", 0), tuple(turns), Truncated("turns"), tail_ids=ints([60, 61])
    )


async def played(folder: Path, beginnings: int = 4) -> TrainBatch:
    """A batch of four episodes that are played at once."""
    config = LocalEngine.Config(max_context=256, device="cpu", max_batch=4)
    async with LocalEngine(config, folder) as engine, asyncio.TaskGroup() as tasks:
        episodes = [tasks.create_task(episode(engine, number, beginnings)) for number in range(4)]
    return collate(
        sample for n, task in enumerate(episodes) for sample in to_samples(task.result(), 1.0 - n)
    )


async def trained(
    folder: Path, batch: TrainBatch, kind: Any = LocalTrainer, **settings: Any
) -> tuple[float, dict[str, float]]:
    """The largest gap to the engine's logprobs, and the metrics of a step."""
    settings = {"device": "cpu", **settings} if kind is LocalTrainer else settings
    async with kind(kind.Config(lr=0.01, **settings), folder, total_steps=1) as trainer:
        predicted_N = await trainer.predict(batch)
        metrics = dict(await trainer.step(batch, LOSS, float(batch.num_loss_tokens)))
    return float(np.abs(predicted_N - batch.rollout_logprobs_N).max()), metrics


@pytest.mark.parametrize("name", evenly(MIXTURES, 6))
def test_a_trainer_that_replays_computes_the_engines_logprobs(
    name: str, folder_of: Callable[[str], Path], perturb: Callable[[str], None]
) -> None:
    folder = folder_of(name)
    perturb("tokens")

    async def main() -> None:
        batch = await played(folder)
        gap, metrics = await trained(folder, batch, routing="replay", micro_batch_tokens=120)
        assert gap < CLOSE
        assert metrics["logprob_gap_max"] < CLOSE
        assert metrics["routing_known"] == 1
        assert 0.05 < metrics["routing_difference"] < 0.95
        gap, metrics = await trained(folder, batch, routing="compare")
        assert gap > 1000 * CLOSE
        assert 0.05 < metrics["routing_difference"] < 0.95
        gap, metrics = await trained(folder, batch)
        assert gap > 1000 * CLOSE
        assert not {"routing_known", "routing_difference"} & metrics.keys()

    asyncio.run(main())


def test_a_prompt_that_is_computed_once_is_routed_once(
    folder_of: Callable[[str], Path], perturb: Callable[[str], None]
) -> None:
    # Each member of a group computes the last token of the prompt itself, as the others do.
    perturb("experts")

    async def main() -> None:
        batch = await played(folder_of("Qwen3-MoE"), beginnings=2)
        gap, metrics = await trained(folder_of("Qwen3-MoE"), batch, routing="replay")
        assert metrics["tokens_computed"] < metrics["tokens"] - 50
        assert gap < CLOSE
        assert metrics["routing_known"] == 1
        assert metrics["routing_difference"] > 0.05

    asyncio.run(main())


async def completions(folder: Path, requests: Sequence[GenerateRequest]) -> list[Completion]:
    config = LocalEngine.Config(max_context=256, device="cpu", max_batch=4)
    async with LocalEngine(config, folder) as engine:
        return [await engine.generate(request) for request in requests]


class ForcedGate(torch.nn.Module):
    """Qwen3-MoE's router, written anew: it weighs experts that are given."""

    def __init__(self, gate: Any, chosen_SK: torch.Tensor) -> None:
        super().__init__()
        self.gate, self.chosen_SK = gate, chosen_SK

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits_SE = hidden_states.flatten(0, -2) @ self.gate.weight.T
        scores_SE = torch.softmax(logits_SE, -1)
        weights_SK = torch.stack(
            [scores[chosen] for scores, chosen in zip(scores_SE, self.chosen_SK, strict=True)]
        )
        return logits_SE, weights_SK / weights_SK.sum(-1, keepdim=True), self.chosen_SK


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_routers_gradient_is_that_of_the_scores_of_the_replayed_experts(
    recompute: Any, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of("Qwen3-MoE")
    tokens, loss_from = ints(range(40, 60)), 12
    drawn = np.random.default_rng(0)
    chosen_TLK = np.stack([[drawn.permutation(4)[:2] for _ in range(2)] for _ in tokens]).astype(
        np.int16
    )
    loss_T = np.arange(len(tokens)) >= loss_from
    sample = TrainingSample(
        tokens,
        loss_T,
        floats(np.zeros(len(tokens))),
        floats(np.zeros(len(tokens))),
        ints(np.where(loss_T, 0, -1)),
        ints(np.zeros(len(tokens))),
        experts=ExpertChoices.of(0, chosen_TLK),
    )
    ((micro_batch,),) = micro_batches(collate([sample]), 64)

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION
    ).eval()
    take_choices(model)
    recompute_blocks(model, recompute)
    with torch.no_grad():
        compute_logprobs_in(model.get_output_embeddings(), scaling_of(model, 1.0))
    routed = RoutedLayers(layers_with_experts(model), 2, replays=True)
    found_N = token_logprobs(model, to_device(micro_batch, torch.device("cpu"), routed=routed))
    found_N.sum().backward()

    eager = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for number, layer in enumerate(eager.model.layers):
        given = torch.from_numpy(chosen_TLK[:, number].astype(np.int64))
        layer.mlp.gate = ForcedGate(layer.mlp.gate, given)
    ids = torch.from_numpy(tokens.astype(np.int64))
    logprobs_T = eager(ids[None]).logits[0].log_softmax(-1)
    wanted_N = logprobs_T[loss_from - 1 : -1].gather(1, ids[loss_from:, None])[:, 0]
    wanted_N.sum().backward()

    torch.testing.assert_close(found_N, wanted_N, atol=CLOSE, rtol=0)
    for own, other in zip(model.model.layers, eager.model.layers, strict=True):
        assert own.mlp.gate.weight.grad.abs().max() > 1e-4
        torch.testing.assert_close(
            own.mlp.gate.weight.grad, other.mlp.gate.gate.weight.grad, atol=CLOSE, rtol=1e-4
        )


def test_an_update_leaves_the_experts_that_earlier_tokens_were_sampled_with(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, prompt, changed = folder_of("Qwen3-MoE"), ints(range(40, 60)), tmp_path / "model"
    rng = torch.Generator().manual_seed(0)
    new = {
        name: weight + 0.1 * torch.randn(weight.shape, generator=rng)
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    shutil.copytree(folder, changed)
    save_file(new, changed / "model.safetensors", {"format": "pt"})

    def member(number: int) -> GenerateRequest:
        return GenerateRequest(
            f"r{number}", prompt, SamplingParams(max_tokens=12), seed=number, keep_experts=True
        )

    async def main() -> list[Completion]:
        config = LocalEngine.Config(max_context=256, device="cpu", max_batch=4)
        async with LocalEngine(config, folder) as engine, asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(engine.generate(member(number))) for number in range(3)]
            while engine.stats().generated_tokens < 18:  # noqa: ASYNC110  it counts steps
                await asyncio.sleep(0)
            await engine.update_weights(new, 1)
            # After the update, all but the first copy the KV of the prompt: those in flight too.
            answers.append(tasks.create_task(engine.generate(member(3))))
        return [answer.result() for answer in answers]

    completions = asyncio.run(main())
    assert [set(completion.policy_versions) for completion in completions] == [{0, 1}] * 3 + [{1}]
    models = [
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (folder, changed)
    ]
    for completion in completions:
        ids = np.concatenate([prompt, completion.token_ids])
        chosen_TLK = read_choices([completion.experts], [len(ids) - 1])
        assert chosen_TLK is not None
        oldest = int(completion.policy_versions.min())
        with torch.no_grad():
            routers = models[oldest](
                torch.from_numpy(ids[None].astype(np.int64)), output_router_logits=True
            )
        # The first layer knows of no others, so one model tells all that it has computed.
        liked_TK = routers.router_logits[0].topk(2).indices.sort().values.numpy()
        sampled = int((completion.policy_versions == oldest).sum())
        before = slice(0, len(prompt) + sampled - 1)
        np.testing.assert_array_equal(np.sort(chosen_TLK[before, 0]), liked_TK[before])


def test_a_request_that_goes_on_adds_the_experts_of_its_own_tokens(
    folder_of: Callable[[str], Path],
) -> None:
    prompt = ints(range(40, 60))
    whole = asked(3, 0, prompt)
    (answer,) = asyncio.run(completions(folder_of("Qwen3-MoE"), [whole]))
    cut = Completion(
        answer.token_ids[:3],
        answer.logprobs[:3],
        answer.policy_versions[:3],
        "abort",
        experts=None if answer.experts is None else answer.experts.until(len(prompt) + 2),
    )
    (rest,) = asyncio.run(completions(folder_of("Qwen3-MoE"), [rest_of(whole, cut)]))
    together = joined(cut, rest)
    assert together.experts is not None
    assert [(span.start, span.stop) for span in together.experts.spans] == [
        (0, len(prompt) + 2),
        (len(prompt) + 2, len(prompt) + len(together.token_ids) - 1),
    ]


def test_a_model_without_experts_has_nothing_to_replay(folder_of: Callable[[str], Path]) -> None:
    async def main() -> None:
        config = LocalTrainer.Config(device="cpu", routing="replay")
        async with LocalTrainer(config, folder_of("Qwen3"), total_steps=1):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"routing=replay.* has no layers of experts"):
        asyncio.run(main())


def test_choices_of_another_model_are_refused(folder_of: Callable[[str], Path]) -> None:
    ids = ints(range(40, 50))
    answer = Completion(
        ids[:3],
        floats((-1, -1, -1)),
        ints((0, 0, 0)),
        "stop",
        experts=ExpertChoices.of(0, np.zeros((12, 5, 2), np.uint8)),
    )
    turn = Turn(ids, answer, 0.0, {})
    batch = collate(to_samples(Trajectory("t", Task("env", 0), (turn,), Terminated()), 1.0))
    with pytest.raises(TrainingError, match=r"of 5 layers, and .* in 2 of 2: they are different"):
        asyncio.run(trained(folder_of("Qwen3-MoE"), batch, routing="replay"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_ranks_replay_as_one_process_does(
    kind: str, folder_of: Callable[[str], Path], perturb: Callable[[str], None]
) -> None:
    from agentrl.trainers.deepspeed import DeepSpeedTrainer
    from agentrl.trainers.fsdp import FsdpTrainer

    folder = folder_of("DeepSeek-V3")
    perturb("tokens")

    async def main() -> None:
        batch = await played(folder)
        _, alone = await trained(folder, batch, routing="replay")
        made: Any = FsdpTrainer if kind == "fsdp" else DeepSpeedTrainer
        more = {} if kind == "fsdp" else {"zero_stage": 3}
        gap, metrics = await trained(folder, batch, made, routing="replay", world_size=2, **more)
        assert gap < CLOSE
        for name in ("loss", "grad_norm", "routing_known", "routing_difference"):
            assert metrics[name] == pytest.approx(alone[name], abs=CLOSE)

    asyncio.run(main())
