"""Adapters of a LoRA trainer on vLLM: served beside the weights, or merged, and the reason why."""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from agentrl.config.components import as_trained_by
from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm import VllmEngine
from agentrl.engines.vllm_adapters import adapter_arguments, room_for, why_merged
from agentrl.engines.vllm_settings import VllmSettings
from agentrl.engines.vllm_start import VllmStart
from agentrl.errors import ConfigError, EngineError
from agentrl.plugins import Component
from agentrl.protocols import GenerateRequest, ScoreRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.trainers import LOSS, random_batches
from agentrl.tokens.arrays import ints
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.settings import LoraSettings
from agentrl.weights.bundle import BundlePlace, weight_shapes
from agentrl.weights.low_rank import Factors, LowRank

T = TypeVar("T")
MAX_CONTEXT = 256
RANK = 4
TOLERANCE = 1e-4
"""Of logprobs, in nats: B (A x) is summed in another order than (W + B A) x, in float32."""


def config(**changes: Any) -> VllmSettings:
    settings = {"max_batch": 4, "max_context": MAX_CONTEXT, "kv_cache_gib": 0.1, **changes}
    return VllmEngine.Config(**settings)


def adapter(folder: Path, seed: int, size: float = 0.3, only: str = "") -> LowRank:
    """An adapter of all linear layers, or of those whose names contain `only`."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, shape in weight_shapes(folder).items():
        if len(shape) == 2 and "embed" not in name and only in name:
            A = torch.randn(RANK, shape[1], generator=generator) / shape[1] ** 0.5
            B = size * torch.randn(shape[0], RANK, generator=generator) / RANK**0.5
            factors[name] = Factors(A, B, 2.0)
    return LowRank(folder, factors)


class Truth:
    """Plain forward passes of weights in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, weights: Any, tokens: list[int], start: int = 1) -> torch.Tensor:
        with torch.inference_mode():
            logits = torch.func.functional_call(
                self.model,
                dict(weights),
                (torch.tensor([tokens]),),
                {"use_cache": False},
                tie_weights=True,
            ).logits[0]
        logprobs = torch.log_softmax(logits[start - 1 : -1], dim=-1)
        return logprobs.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def folder(shallow_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of large weights: fresh ones predict all tokens alike, and hide every fault."""
    made = tmp_path_factory.mktemp("models") / "lively"
    model = AutoModelForCausalLM.from_pretrained(shallow_model_dir)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6.0)
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(shallow_model_dir).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    return Truth(folder)


class Served:
    """An engine on a loop of its own for all tests of the module."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.runner = asyncio.Runner()
        self.count = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(300):
                return await work

        return self.runner.run(bounded())

    async def update(self, weights: Any) -> int:
        version = self.engine.policy_version + 1
        await self.engine.update_weights(weights, version)
        return version

    async def score(self, tokens: list[int]) -> torch.Tensor:
        self.count += 1
        scored = await self.engine.score(ScoreRequest(f"score-{self.count}", ints(tokens), 1))
        assert scored.policy_version == self.engine.policy_version
        return torch.from_numpy(scored.logprobs.copy())

    async def generate(self, prompt: list[int], tokens: int, seed: int = 0) -> Any:
        self.count += 1
        params = SamplingParams(max_tokens=tokens)
        request = GenerateRequest(f"request-{self.count}", ints(prompt), params, seed)
        return await self.engine.generate(request)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, 400, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    served = Served(VllmEngine(config(adapter_rank=RANK, adapters="serve"), folder))
    served.runner.run(served.engine.__aenter__())
    yield served
    served.runner.run(served.engine.__aexit__())
    served.runner.close()


@pytest.mark.vllm
@pytest.mark.long
def test_served_factors_give_the_logprobs_of_weights_merged_in_float32(
    served: Served, folder: Path, truth: Truth
) -> None:
    async def main() -> None:
        tokens = tokens_of(120)
        assert (await served.score(tokens) - truth.logprobs({}, tokens)).abs().max() < TOLERANCE
        for update in (adapter(folder, 1), adapter(folder, 2, only="v_proj"), LowRank(folder, {})):
            version = await served.update(update)
            expected = truth.logprobs(update, tokens)
            assert (await served.score(tokens) - expected).abs().max() < TOLERANCE
            completion = await served.generate(tokens[:30], 20)
            assert set(completion.policy_versions.tolist()) == {version}
            whole = [*tokens[:30], *completion.token_ids.tolist()]
            sampled = truth.logprobs(update, whole, 30)
            assert (torch.from_numpy(completion.logprobs.copy()) - sampled).abs().max() < TOLERANCE
        moved = truth.logprobs(adapter(folder, 1), tokens) - truth.logprobs({}, tokens)
        assert moved.abs().max() > 1000 * TOLERANCE  # else the test could not fail

    served.run(main())


@pytest.mark.vllm
@pytest.mark.long
def test_a_request_in_flight_goes_on_under_the_new_factors(
    served: Served, folder: Path, truth: Truth
) -> None:
    old, new = adapter(folder, 3), adapter(folder, 4)
    prompt = tokens_of(20, seed=3)

    async def updated_meanwhile(seed: int) -> tuple[Any, int, int]:
        """An answer, and the versions before and after the update that came while it was sampled,
        or, on a busy machine, after that.
        """
        first = await served.update(old)
        generated = served.engine.stats().generated_tokens
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(served.generate(prompt, 220, seed))
            while served.engine.stats().generated_tokens < generated + 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            second = await served.update(new)
        return answer.result(), first, second

    async def main() -> None:
        for seed in range(50):
            completion, first, second = await updated_meanwhile(seed)
            versions = completion.policy_versions.tolist()
            if second in versions:
                break
        assert sorted(versions) == versions
        assert set(versions) == {first, second} == {second - 1, second}
        whole = [*prompt, *completion.token_ids.tolist()]
        told = torch.from_numpy(completion.logprobs.copy())
        for version, update in ((first, old), (second, new)):
            stamped = torch.tensor(versions) == version
            gap = (told - truth.logprobs(update, whole, len(prompt)))[stamped].abs().max()
            assert gap < TOLERANCE, (version, gap)

    served.run(main())


@pytest.mark.vllm
@pytest.mark.long
def test_updates_read_the_factors_alone_and_memory_stays_flat(
    served: Served, folder: Path, truth: Truth, tmp_path: Path
) -> None:
    def bytes_used() -> int:
        workers = psutil.Process().children(recursive=True)
        return sum(worker.memory_info().rss for worker in workers)

    async def main() -> None:
        tokens, used = tokens_of(60), []
        updates = [adapter(folder, number) for number in range(25)]
        expected = truth.logprobs(updates[-1], tokens)
        weights = folder / "model.safetensors"
        hidden = weights.rename(tmp_path / weights.name)  # a read of the model's weights now fails
        try:
            for number, update in enumerate(updates):
                bundle = BundlePlace(tmp_path / f"v{number}", number, 1 << 20).write(update)
                await served.engine.stage_weights(bundle, served.engine.policy_version + 1)
                await served.update(bundle)
                factors = sum(A.nbytes + B.nbytes for A, B, _ in update.factors.values())
                assert factors <= bundle.size < 1.1 * factors
                await served.score(tokens)
                used.append(bytes_used())
        finally:
            hidden.rename(weights)
        assert (await served.score(tokens) - expected).abs().max() < TOLERANCE
        assert bundle.size < weights.stat().st_size / 4
        # Twenty adapters more would have been twice the growth that is allowed.
        print(f"bytes an update {bundle.size}, of the model {weights.stat().st_size}; rss {used}")
        assert used[-1] - used[4] < 10 * bundle.size

    served.run(main())


@pytest.mark.vllm
@pytest.mark.long
def test_whole_weights_and_factors_of_another_folder_replace_what_is_served(
    served: Served, folder: Path, truth: Truth, tmp_path: Path
) -> None:
    """Whole weights drop the factors, and factors bring back the weights that they belong to."""

    async def main() -> None:
        tokens = tokens_of(60, seed=5)
        await served.update(adapter(folder, 6))
        whole = {
            name: weight + 0.2 * torch.randn(weight.shape) * weight.std(correction=0)
            for name, weight in LowRank(folder, {}).items()
        }
        await served.update(whole)
        expected = truth.logprobs(whole, tokens)
        assert (await served.score(tokens) - expected).abs().max() < 1e-3
        save_file(whole, tmp_path / "model.safetensors")
        for base in (folder, tmp_path, folder):
            update = adapter(base, 7)
            await served.update(update)
            expected = truth.logprobs(update, tokens)
            assert (await served.score(tokens) - expected).abs().max() < 1e-3

    served.run(main())


@pytest.mark.vllm
@pytest.mark.long
def test_factors_that_cannot_be_served_are_refused_and_change_nothing(
    served: Served, folder: Path, truth: Truth
) -> None:
    async def main() -> None:
        good = adapter(folder, 8)
        await served.update(good)
        version = served.engine.policy_version
        name = "model.embed_tokens.weight"
        rows, width = weight_shapes(folder)[name]
        embedding = Factors(torch.ones(RANK, width), torch.ones(rows, RANK), 1.0)
        with pytest.raises(EngineError, match=r"no room for adapters of 1 weights such as .*embed"):
            await served.update(LowRank(folder, {name: embedding}))
        wide = {
            name: Factors(torch.cat([A] * 3), torch.cat([B] * 3, 1), scale)
            for name, (A, B, scale) in good.factors.items()
        }
        with pytest.raises(
            EngineError, match=r"rank 12, .* room for 8: write engine.adapters=auto"
        ):
            await served.update(LowRank(folder, wide))
        name = "model.layers.0.self_attn.q_proj.weight"
        A, B, scale = good.factors[name]
        with pytest.raises(EngineError, match=r"these adapters do not fit .*q_proj"):
            await served.update(LowRank(folder, {name: Factors(A[:, 1:], B, scale)}))
        assert served.engine.policy_version == version
        tokens = tokens_of(60)
        gap = (await served.score(tokens) - truth.logprobs(good, tokens)).abs().max()
        assert gap < TOLERANCE

    served.run(main())


@pytest.mark.vllm
@pytest.mark.long
def test_factors_that_cannot_be_served_are_merged_if_they_may_be(
    served: Served,
    folder: Path,
    truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here of the embeddings, and so of the head that is tied to them."""
    monkeypatch.setattr(served.engine._adapters, "settings", config(adapter_rank=RANK))
    name = "model.embed_tokens.weight"
    rows, width = weight_shapes(folder)[name]

    async def main() -> None:
        tokens = tokens_of(60, seed=6)
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            A = torch.randn(RANK, width, generator=generator)
            B = 0.1 * torch.randn(rows, RANK, generator=generator)
            merged = LowRank(folder, {name: Factors(A, B, 1.0)})
            for update in (merged, adapter(folder, seed), merged):
                await served.update(update)
                expected = truth.logprobs(update, tokens)
                assert (await served.score(tokens) - expected).abs().max() < 1e-3

    served.run(main())
    assert caplog.text.count("the engine merges adapters into its weights, since vLLM has no") == 1


def reason(**changes: Any) -> str:
    settings = config(**{"adapter_rank": RANK, **changes})
    return why_merged(settings, PretrainedConfig(), on_cpu=True, has_bfloat16=False)


def test_what_vllm_cannot_serve_is_merged_and_the_reason_is_named() -> None:
    assert reason() == reason(dtype="float32") == reason(dtype="bfloat16") == ""
    assert reason(adapters="merge") == "engine.adapters=merge"
    assert "rank is 513, and vLLM has room for 512" in reason(adapter_rank=513)
    assert "speculative" in reason(speculative={"method": "ngram", "tokens": 2})
    latent = PretrainedConfig(kv_lora_rank=512)
    assert "MLA" in why_merged(config(adapter_rank=8), latent, on_cpu=True, has_bfloat16=False)
    mixture = PretrainedConfig(num_experts_per_tok=2)
    assert "experts" in why_merged(config(adapter_rank=8), mixture, on_cpu=True, has_bfloat16=False)
    assert not why_merged(config(adapter_rank=8), mixture, on_cpu=False, has_bfloat16=True)
    on_gpu = {"on_cpu": False, "has_bfloat16": True}
    plain = PretrainedConfig()
    assert not why_merged(config(adapter_rank=8), plain, **on_gpu)
    assert "float32" in why_merged(config(adapter_rank=8, dtype="float32"), plain, **on_gpu)
    assert [room_for(rank) for rank in (1, 2, 8, 9, 300, 512)] == [1, 8, 8, 16, 320, 512]


def test_adapters_that_must_be_served_and_cannot_be_are_refused_before_the_start(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM would start after this, which it has not."""
    wanted = {"adapter_rank": 600}
    with pytest.raises(ConfigError, match=r"rank is 600, .*\. Write engine.adapters=auto"):
        VllmStart(config(adapters="serve", **wanted), tiny_model_dir).room_for_adapters(on_cpu=True)
    start = VllmStart(config(adapters="auto", **wanted), tiny_model_dir)
    assert start.room_for_adapters(on_cpu=True) is None
    assert "merges adapters into its weights, since their rank is 600" in caplog.text
    caplog.clear()
    none = VllmStart(config(), tiny_model_dir).room_for_adapters(on_cpu=True)
    assert none is None  # no adapters are trained
    assert not caplog.text


def room(written: dict[str, Any], lora: LoraSettings) -> VllmSettings:
    """An engine's settings in a run that trains such adapters."""
    trainer = Component("local", LocalTrainer, LocalTrainer.Config(lora=lora))
    engine = Component("vllm", VllmEngine, config(**written))
    settings = as_trained_by(engine, trainer).settings
    assert isinstance(settings, VllmSettings)
    return settings


def test_the_room_follows_from_the_trainer(tiny_model_dir: Path) -> None:
    def targets(settings: VllmSettings, **model: Any) -> list[str]:
        arguments = adapter_arguments(settings, tiny_model_dir, PretrainedConfig(**model))
        named: list[str] = arguments["lora_target_modules"]
        return named

    two = room({}, LoraSettings(rank=12, targets=("q_proj", "down_proj")))
    assert (two.adapter_rank, two.adapter_targets) == (12, ("q_proj", "down_proj"))
    assert adapter_arguments(two, tiny_model_dir, PretrainedConfig()) == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
        "lora_target_modules": ["q_proj", "down_proj"],
    }
    assert room({"adapter_rank": 64}, LoraSettings(rank=12)).adapter_rank == 64
    attention = ["k_proj", "o_proj", "q_proj", "v_proj"]
    linear = sorted([*attention, "gate_proj", "up_proj", "down_proj"])
    assert targets(room({}, LoraSettings())) == linear
    assert targets(room({}, LoraSettings()), num_experts_per_tok=2) == attention


def test_engines_without_adapters_stay_as_they_are() -> None:
    whole = Component("local", LocalTrainer, LocalTrainer.Config())
    adapted = Component("local", LocalTrainer, LocalTrainer.Config(lora=LoraSettings()))
    vllm = Component("vllm", VllmEngine, config())
    local = Component("local", LocalEngine, LocalEngine.Config())
    assert as_trained_by(vllm, whole) is vllm
    assert as_trained_by(local, adapted) is local


def test_merged_into_bfloat16_a_small_update_is_lost_and_served_it_is_not(
    shallow_model_dir: Path,
) -> None:
    """One step of a trainer at a learning rate of 1e-5: of the weights that it changes, most are
    the same numbers as before in an engine in bfloat16, and all others in one in float32. Factors
    in bfloat16, as vLLM serves them, make up the update to half a per cent.
    """

    async def main() -> None:
        lora = LoraSettings(rank=16)
        trained = LocalTrainer.Config(lora=lora, lr=1e-5, device="cpu", dtype="float32")
        trainer = LocalTrainer(trained, shallow_model_dir, total_steps=2)
        async with trainer:
            for batch in random_batches(shallow_model_dir, 1):
                await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
            update = await trainer.weights()
        assert isinstance(update, LowRank)
        moved = {}
        for dtype in ("float32", "bfloat16"):
            served = LocalEngine.Config.model_validate({"device": "cpu", "dtype": dtype})
            async with LocalEngine(served, shallow_model_dir) as engine:
                before = {name: engine.weights[name].clone() for name in update.factors}
                await engine.update_weights(update, 1)
                changed = [(engine.weights[name] != before[name]).flatten() for name in before]
                moved[dtype] = float(torch.cat(changed).float().mean())
        assert moved["bfloat16"] < 0.1
        assert moved["float32"] > 0.9
        for name, (A, B, scale) in update.factors.items():
            exact, rounded = scale * B @ A, (scale * B).bfloat16().float() @ A.bfloat16().float()
            assert (exact - rounded).norm() < 0.005 * exact.norm(), name

    asyncio.run(main())
