"""Models whose logprobs would be wrong are refused by name, and those of all others are right."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.batch import TrainingSample, collate
from agentrl.engines.local import LocalEngine
from agentrl.errors import ConfigError
from agentrl.models.attention_check import check_context, check_kind, context_limit
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import ints
from agentrl.trainers.local import LocalTrainer
from tests.model_families import EXPERTS, SMALL, WINDOWS, save_random

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}
COMMON = tuple(range(3, 40))
PROMPTS = (COMMON, (*COMMON, 50, 51), (*COMMON, *[60] * 30), (7, 8, 9, 10))


def random_model(folder: Path, config: str, settings: Mapping[str, Any]) -> Path:
    """A folder with random weights of a class of transformers."""
    ends = {"eos_token_id": 159, "pad_token_id": None, "bos_token_id": None}
    save_random(
        getattr(transformers, config)(**{"vocab_size": 160, **SMALL, **settings, **ends}), folder
    )
    return folder


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ("BloomConfig", {}, r"BloomForCausalLM computes attention by itself"),
        ("FalconConfig", {"alibi": True}, r"FalconForCausalLM computes attention by itself"),
        ("MptConfig", {}, r"MptForCausalLM computes attention by itself"),
        ("RwkvConfig", {}, r"RwkvForCausalLM has recurrent layers"),
        (
            "RecurrentGemmaConfig",
            {},
            r"RecurrentGemmaForCausalLM has (recurrent layers|.* linear_attention)",
        ),
        ("xLSTMConfig", {}, r"xLSTMForCausalLM has recurrent layers"),
        ("MambaConfig", {}, r"MambaForCausalLM has layers of the kinds linear_attention"),
        ("JambaConfig", {}, r"layers of the kinds linear_attention"),
        ("Qwen3_5TextConfig", {}, r"Qwen3_5ForCausalLM has layers of the kinds linear_attention"),
        ("Lfm2Config", {"full_attn_idxs": [1]}, r"Lfm2ForCausalLM has layers of the kinds conv"),
        ("Llama4TextConfig", {}, r"Llama4ForCausalLM has layers of the kinds chunked_attention"),
        ("BartConfig", {}, r"BartForCausalLM is one half of an encoder and a decoder"),
    ],
)
def test_a_family_that_mixes_sequences_is_refused_by_its_name(
    config: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_kind(getattr(transformers, config)(**settings), tmp_path)


async def served(folder: Path) -> None:
    async with LocalEngine(LocalEngine.Config(device="cpu"), folder):
        pass


async def trained(folder: Path, head: str = "logprobs") -> None:
    async with LocalTrainer(LocalTrainer.Config(device="cpu"), folder, total_steps=1):
        pass


@pytest.mark.parametrize("use", [served, trained])
@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ("StableLmConfig", {}, r"StableLmAttention of transformers does not hand on the arguments"),
        (
            "Qwen2MoeConfig",
            {
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 8,
                "use_sliding_window": True,
                "shared_expert_intermediate_size": 8,
                "max_window_layers": 1,
                "sliding_window": 48,
            },
            r"Qwen2MoeForCausalLM has a sliding window of 48 tokens .* "
            r"of which only its mask knows",
        ),
        ("DogeConfig", {"sliding_window": None}, r"DogeForCausalLM computes other hidden states"),
    ],
)
def test_a_model_that_computes_something_else_with_another_attention_is_refused(
    config: str, settings: dict[str, Any], message: str, use: Any, tmp_path: Path
) -> None:
    folder = random_model(tmp_path / "model", config, settings)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(use(folder))


def logprobs_alone(
    folder: Path, sequences: list[tuple[list[int], int]]
) -> list[np.ndarray[Any, Any]]:
    """By transformers' own attention, one sequence at a time: the logprobs of the tokens after the
    first `start`.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for ids, start in sequences:
        with torch.no_grad():
            all_TV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        found.append(
            all_TV[torch.arange(start - 1, len(ids) - 1), torch.tensor(ids[start:])].numpy()
        )
    return found


async def played_and_predicted(folder: Path) -> tuple[list[tuple[list[int], int]], list[Any], Any]:
    """What the engine sampled in one batch, with its logprobs, and the trainer's of the same packed
    samples.
    """
    async with LocalEngine(LocalEngine.Config(device="cpu", max_context=256), folder) as engine:
        sampled = SamplingParams(max_tokens=30)
        requests = [
            GenerateRequest(f"r{n}", ints(prompt), sampled, seed=n)
            for n, prompt in enumerate(PROMPTS)
        ]
        async with asyncio.TaskGroup() as tasks:
            live = [tasks.create_task(engine.generate(request)) for request in requests]
    answers, sequences, samples = [one.result() for one in live], [], []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, start = [*prompt, *map(int, answer.token_ids)], len(prompt)
        sequences.append((ids, start))
        loss = np.arange(len(ids)) >= start
        logprobs = np.append(np.zeros(start), answer.logprobs)
        samples.append(
            TrainingSample(
                ids, loss, logprobs, loss * 1.0, np.where(loss, 0, -1), np.zeros(len(ids))
            )
        )
    async with LocalTrainer(LocalTrainer.Config(device="cpu"), folder, total_steps=1) as trainer:
        predicted = await trainer.predict(collate(samples))
    return sequences, [answer.logprobs for answer in answers], predicted


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}),
        ("GPTNeoXConfig", {"use_parallel_residual": True, "rotary_pct": 0.5}),
        ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 32, "dropout": 0.0}),
        ("Cohere2Config", WINDOWS),
        (
            "Gemma4TextConfig",
            {
                **WINDOWS,
                "num_hidden_layers": 4,
                "layer_types": WINDOWS["layer_types"] * 2,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": 160,
                "global_head_dim": 32,
            },
        ),
        ("MixtralConfig", {**EXPERTS, "num_local_experts": 4, "sliding_window": 48}),
        ("Phi3Config", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 256}),
    ],
)
def test_engine_and_trainer_have_the_logprobs_of_each_sequence_alone(
    config: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Learned and shifted positions, parallel residuals, scaled and capped logits, shared keys,
    experts.
    """
    folder = random_model(tmp_path / "model", config, settings)
    sequences, of_engine, of_trainer = asyncio.run(played_and_predicted(folder))
    alone = logprobs_alone(folder, sequences)
    assert np.abs(np.concatenate(of_engine) - np.concatenate(alone)).max() < 1e-4
    assert np.abs(of_trainer - np.concatenate(alone)).max() < 1e-4


def test_sequences_that_would_rotate_positions_in_another_way_are_refused(tmp_path: Path) -> None:
    settings = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 40}
    folder = random_model(tmp_path / "model", "Phi3Config", settings)
    assert context_limit(AutoConfig.from_pretrained(folder)) == 40

    async def main() -> None:
        async with LocalEngine(LocalEngine.Config(device="cpu"), folder) as engine:
            assert engine.max_context == 40
        with pytest.raises(
            ConfigError, match=r"engine.max_context=41, but the model's limit is 40 tokens"
        ):
            async with LocalEngine(LocalEngine.Config(device="cpu", max_context=41), folder):
                pass
        ids, loss = np.arange(41), np.arange(41) > 20
        long = TrainingSample(
            ids, loss, loss * -1.0, loss * 1.0, np.where(loss, 0, -1), np.zeros(41)
        )
        async with LocalTrainer(
            LocalTrainer.Config(device="cpu"), folder, total_steps=1
        ) as trainer:
            with pytest.raises(
                ConfigError, match=r"a sample has 41 tokens: .* write engine.max_context=40"
            ):
                await trainer.predict(collate([long]))

    asyncio.run(main())
    with pytest.raises(ConfigError, match=r"only 2048 tokens are exact"):
        check_context(
            transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            2049,
            "here",
        )
    assert context_limit(transformers.LlamaConfig()) is None
