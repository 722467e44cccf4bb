"""`engine=vllm` with models that see: what the family's own forward pass computes."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from agentrl.config import load_config
from agentrl.config.loading import check_options
from agentrl.engines import vllm_pictures
from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm import VllmEngine
from agentrl.engines.vllm_pictures import picture_arguments, why_blind, why_not_started
from agentrl.engines.vllm_start import VllmStart
from agentrl.errors import ConfigError, EngineError
from agentrl.models.vision import part_of
from agentrl.protocols import Engine, GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.vision_models import VisionFamily, create_tiny_vision_model
from agentrl.tokens.arrays import ints
from agentrl.tokens.placed_images import PlacedImage, shifted
from tests.engines.test_seeing import Context, Family, check, picture, request

ALONE = ("idefics3", "smolvlm")
LOOKING_BACK = ("internvl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
"""Families that vLLM computes on CPUs where it has torchvision."""
needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="vLLM's code of these families imports torchvision"
)
BLOCK = 32


def config(**changes: Any) -> Any:
    given = {"dtype": "float32", "max_context": 512, "kv_cache_gib": 0.1, "max_batch": 8}
    return VllmEngine.Config(**{**given, "args": {"block_size": BLOCK}, **changes})


def folder_of(path: Path, family: VisionFamily, weights: Mapping[str, torch.Tensor]) -> Path:
    """A model of a family with these weights."""
    create_tiny_vision_model(path, family)
    save_file(dict(weights), path / "model.safetensors", metadata={"format": "pt"})
    return path


class Models:
    """A model, another one, and one with the language of the first and the eyes of the other."""

    def __init__(self, folder: Path, family: VisionFamily) -> None:
        self.first, self.other = folder / "first", folder / "other"
        create_tiny_vision_model(self.first, family)
        create_tiny_vision_model(self.other, family, seed=1)
        self.weights = load_file(self.first / "model.safetensors")
        self.others = load_file(self.other / "model.safetensors")
        self.language = {
            name: weight for name, weight in self.weights.items() if part_of(name) == "language"
        }
        self.mixed = folder_of(folder / "mixed", family, {**self.others, **self.language})


async def check_answers(engine: Engine, family: Family, name: str) -> None:
    """Answers to prompts with pictures and without, and those of their next turns."""
    one, other, wide = picture(0), picture(1), picture(2, 60, 130)
    contexts = [
        family.context([10, 20, 30], one, [40] * BLOCK),
        family.context([10, 20, 30], other, [40] * BLOCK),  # the same tokens
        family.context([17] * BLOCK, wide, [13], one, [15]),
        family.context([19, 18, 17]),
    ]
    asked = [request(f"{name}-{n}", c, session=f"{name}-{n}") for n, c in enumerate(contexts)]
    answers = await asyncio.gather(*map(engine.generate, asked))
    cached = engine.stats().cached_tokens
    for number, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
        check(family, context, answer)
        begun = [*context[0], *answer.token_ids.tolist()]
        ids, images = family.context([33], other, [12])
        later = [*begun, *ids], (*context[1], *shifted(images, len(begun)))
        more: Any = {"session": f"{name}-{number}", "known": len(begun)}
        check(
            family, later, await engine.generate(request(f"{name}-later-{number}", later, **more))
        )
    assert engine.stats().cached_tokens - cached >= 3 * BLOCK
    # Equal tokens, other pictures.
    swapped = contexts[0][0], contexts[1][1]
    check(family, swapped, await engine.generate(request(f"{name}-swapped", swapped)))


async def check_refusals(engine: Engine, family: Family) -> None:
    """Pictures that the tokens do not stand for end their request, and no other."""
    context = family.context([10], picture(0), [40])
    placed = replace(context[1][0], image=picture(3, 28, 56))
    with pytest.raises(EngineError, match="render it with the model's own renderer"):
        await engine.generate(request("other", (context[0], (placed,))))
    blank = (PlacedImage(1, 2, picture(0)),)
    with pytest.raises(EngineError, match="has 0 placeholders"):
        await engine.generate(request("blank", ([9, 300, 300, 9], blank)))
    # A placeholder that the model has sampled is no picture.
    sampled: Context = [*context[0], family.vision.placeholder, 12], context[1]
    answer = await engine.generate(request("sampled", sampled))
    async with LocalEngine(LocalEngine.Config(dtype="float32"), family.folder) as local:
        expected = await local.generate(request("sampled", sampled))
    assert answer.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-5)


async def check_updates(engine: Engine, models: Models) -> None:
    """New weights of all parts, and of the language alone, as where the eyes are frozen."""
    other = Family(models.other)
    context = other.context([10, 20, 30], picture(0), [40, 41])
    # In flight, it goes on under the new weights, with KV of its picture computed again.
    sampling = SamplingParams(temperature=1, max_tokens=400)
    long = GenerateRequest("long", ints(context[0]), sampling, images=context[1])
    running, before = asyncio.create_task(engine.generate(long)), engine.stats().generated_tokens
    while engine.stats().generated_tokens < before + 5:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await engine.update_weights(models.others, 1)
    answer = await running
    ids = [*context[0], *answer.token_ids.tolist()]
    first = len(context[0]) + int((answer.policy_versions == 0).sum())
    assert len(context[0]) + 5 <= first < len(ids)
    logprobs = [other.logprob(ids[: end + 1], context[1]) for end in range(first, len(ids), 25)]
    np.testing.assert_allclose(answer.logprobs[first - len(context[0]) :: 25], logprobs, atol=1e-5)
    await check_answers(engine, other, "new")
    await engine.update_weights(models.language, 2)
    mixed = Family(models.mixed)
    await check_answers(engine, mixed, "mixed")
    some = dict(list(models.weights.items())[:-1])
    with pytest.raises(EngineError, match=r"missing \["):
        await engine.update_weights(some, 3)


async def check_family(folder: Path, name: VisionFamily) -> None:
    models = Models(folder, name)
    async with VllmEngine(config(), models.first) as engine:
        family = Family(models.first)
        await check_answers(engine, family, "first")
        await check_refusals(engine, family)
        await check_updates(engine, models)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(one, marks=pytest.mark.long) for one in ("smolvlm", "idefics3")),
        *(pytest.param(one, marks=[pytest.mark.long, needs_torchvision]) for one in LOOKING_BACK),
    ],
)
def test_answers_are_those_of_the_familys_own_forward_pass(
    name: VisionFamily, tmp_path: Path
) -> None:
    asyncio.run(asyncio.wait_for(check_family(tmp_path, name), 500))


@pytest.mark.vllm
@pytest.mark.long
def test_no_prompt_is_cut_before_a_picture_that_others_leave_no_room_for(tmp_path: Path) -> None:
    folder, count = tmp_path / "model", 40
    create_tiny_vision_model(folder, "idefics3")
    pixels = json.loads((folder / "preprocessor_config.json").read_text())
    pixels["size"] = {"longest_edge": 112}  # 68 rows of features
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    # vLLM derives its largest picture from this.
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    family, sampling = Family(folder), SamplingParams(temperature=1, max_tokens=2)
    large = len(family.context(picture(0, 112, 112))[0])
    text = [10] * (4 * BLOCK - large + 6)  # the prefix cache ends inside of each large picture
    prompts = {}
    for number in range(count):
        first, second = picture(number, 112, 112), picture(100 + number, 28, 112)
        prompts[f"first-{number}"] = family.context(text, first)
        prompts[f"second-{number}"] = family.context(text, first, second, [12])

    def asked(name: str) -> GenerateRequest:
        ids, images = prompts[name]
        return GenerateRequest(name, ints(ids), sampling, seed=7, images=images)

    async def main() -> None:
        settings = config(max_num_batched_tokens=512, max_batch=count)
        async with VllmEngine(settings, folder) as engine, asyncio.TaskGroup() as tasks:
            for number in range(count):
                await engine.generate(asked(f"first-{number}"))
            llm: Any = engine._llm
            await llm.pause_generation(mode="keep", clear_cache=False)
            answers = [
                tasks.create_task(engine.generate(asked(f"second-{number}")))
                for number in range(count)
            ]
            while len(llm.output_processor.request_states) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await llm.resume_generation()
            assert [len((await answer).token_ids) for answer in answers] == [2] * count
            assert engine.stats().cached_tokens == count * 4 * BLOCK

    asyncio.run(asyncio.wait_for(main(), 500))


def family_config(family: str, **text: Any) -> Any:
    changed = {"text_config": text} if text else {}
    return AutoConfig.for_model(family, **changed)


def test_what_vllm_cannot_see_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"torchvision": None}
    monkeypatch.setattr(vllm_pictures, "find_spec", lambda name: found[name])
    for name in ALONE:
        assert why_blind(family_config(name), {}, on_cpu=True) == ""
    for name in LOOKING_BACK:
        why = why_blind(family_config(name), {}, on_cpu=True)
        assert f"the family {name} imports torchvision, which is not installed" in why
    assert why_not_started("qwen3") == ""
    found["torchvision"] = Path()
    for name in (*ALONE, *LOOKING_BACK, "gemma4"):
        assert why_blind(family_config(name), {}, on_cpu=True) == ""
    both_ways = family_config("gemma4", use_bidirectional_attention="vision")
    for seen in (family_config("gemma3"), both_ways):
        assert "vLLM for CPUs does not compute" in why_blind(seen, {}, on_cpu=True)
        assert why_blind(seen, {}, on_cpu=False) == ""
    smol = family_config("smolvlm")
    for arguments in ({"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}}):
        assert "lets vLLM read text alone" in why_blind(smol, arguments, on_cpu=False)
    assert "paligemma is not known" in why_blind(family_config("paligemma"), {}, on_cpu=False)


@pytest.mark.vllm
def test_a_run_that_would_show_pictures_in_vain_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_pictures, "find_spec", lambda name: None)
    create_tiny_vision_model(tmp_path / "sees", "idefics3")
    run = tmp_path / "run.yaml"
    run.write_text("env: {name: frozen_lake, options: {view: picture}}\nengine: vllm\n")
    check_options(load_config(run, [f"model={tmp_path / 'sees'}"]))
    for given in (
        ["model=tiny_vision"],
        [f"model={tmp_path / 'sees'}", "engine.args.language_model_only=true"],
    ):
        with pytest.raises(ConfigError, match="would show pictures, and engine=vllm cannot read"):
            check_options(load_config(run, given))


@pytest.mark.vllm
def test_a_model_that_needs_torchvision_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_pictures, "find_spec", lambda name: None)
    create_tiny_vision_model(tmp_path / "model", "qwen2_5_vl")
    with pytest.raises(ConfigError, match="the family qwen2_5_vl imports torchvision"):
        VllmStart(config(), tmp_path / "model").arguments(on_cpu=True)


def test_vllm_starts_with_pictures_or_with_text_alone(tmp_path: Path) -> None:
    create_tiny_vision_model(tmp_path / "sees", "smolvlm")
    create_tiny_vision_model(tmp_path / "both", "gemma3")
    start = VllmStart(config(), tmp_path / "sees")
    assert start.is_shown_pictures(on_cpu=True)
    assert start.overrides(shown=True) == {"architectures": ["Idefics3ForConditionalGeneration"]}
    assert picture_arguments(shown=True, on_cpu=True)["mm_device_do_normalize"] is False
    assert not VllmStart(config(), tmp_path / "both").is_shown_pictures(on_cpu=True)
    assert picture_arguments(shown=False, on_cpu=True) == {"language_model_only": True}
