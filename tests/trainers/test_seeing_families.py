"""Each family that sees: packed samples that show pictures are the family's own for each alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.batch import collate
from agentrl.models.vision import Vision, attention_of, part_of
from agentrl.models.vision_families import FAMILIES
from agentrl.placement.mesh import ONE_RANK
from agentrl.trainers.compute.forward import to_device
from agentrl.trainers.compute.pictures import PictureReader
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.packing import micro_batches
from agentrl.trainers.rank.worker import TrainerRank
from agentrl.trainers.spec import TrainerSpec
from tests.tiers import evenly
from tests.trainers.test_seeing import BEGIN, END, IMAGE, SETTINGS, WHOLE, alone, picture, sample

pytestmark = pytest.mark.slow
TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
AXES = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
MARKS = {
    "image_token_id": IMAGE,
    "video_token_id": 291,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}


def gemma3() -> tuple[Any, Any]:
    """With pictures that are longer than the window of two of the layers."""
    from transformers import Gemma3Config
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 6, "layer_types": layers},
        vision_config={**TOWER, "num_hidden_layers": 2, "image_size": 42, "patch_size": 7}
        | {"vision_use_head": False},
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    return config, Gemma3ImageProcessorPil(size={"height": 42, "width": 42})


def gemma4() -> tuple[Any, Any]:
    """With inputs of each layer, keys of other layers, capped logits, and a tower that hears."""
    from transformers import Gemma4Config
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    layers = ["sliding_attention", "full_attention"] * 3
    text = {
        **TEXT,
        "num_hidden_layers": 6,
        "layer_types": layers,
        "sliding_window": 6,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "use_bidirectional_attention": "vision",
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 5.0,
    }
    tower = {**TOWER, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    pools = {"patch_size": 4, "pooling_kernel_size": 2}
    config = Gemma4Config(
        text_config=text,
        vision_config={**tower, **pools, "position_embedding_size": 128},
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "output_proj_dims": 32,
            "subsampling_conv_channels": [8, 4],
        },
        image_token_id=IMAGE,
        boi_token_id=BEGIN,
        eoi_token_id=END,
    )
    return config, Gemma4ImageProcessorPil(**pools, max_soft_tokens=70)


def qwen_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 784 * 64})


def qwen2_vl() -> tuple[Any, Any]:
    from transformers import Qwen2VLConfig

    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    text = {**TEXT, "rope_parameters": AXES}
    return Qwen2VLConfig(text_config=text, vision_config=tower, **MARKS), qwen_processor()


def qwen3_vl() -> tuple[Any, Any]:
    from transformers import Qwen3VLConfig

    tower = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 14,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    text = {**TEXT, "rope_parameters": {**AXES, "mrope_interleaved": True}}
    return Qwen3VLConfig(text_config=text, vision_config=tower, **MARKS), qwen_processor()


def internvl() -> tuple[Any, Any]:
    from transformers import InternVLConfig
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
        GotOcr2ImageProcessorPil,
    )

    tower = {**TOWER, "num_hidden_layers": 2, "image_size": [28, 28], "patch_size": [7, 7]}
    config = InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config=tower,
        image_token_id=IMAGE,
        image_seq_length=4,
    )
    size = {"height": 28, "width": 28}
    return config, GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=4)


def idefics3() -> tuple[Any, Any]:
    from transformers import Idefics3Config
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    return tiled(Idefics3Config), Idefics3ImageProcessorPil(**TILES)


def smolvlm() -> tuple[Any, Any]:
    from transformers import SmolVLMConfig
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return tiled(SmolVLMConfig), SmolVLMImageProcessorPil(**TILES)


TILES: dict[str, Any] = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}


def tiled(kind: Any) -> Any:
    tower = {**TOWER, "num_hidden_layers": 2, "image_size": 28, "patch_size": 7}
    return kind(
        text_config={**TEXT, "model_type": "llama"},
        vision_config=tower,
        image_token_id=IMAGE,
        scale_factor=2,
    )


MAKERS = (gemma3, gemma4, idefics3, internvl, qwen2_vl, qwen3_vl, smolvlm)


def test_every_family_is_tried() -> None:
    assert {make.__name__ for make in MAKERS} | {"qwen2_5_vl"} == set(FAMILIES)


@pytest.mark.parametrize("make", evenly(MAKERS, 3))
def test_packed_samples_of_each_family_are_its_own_for_each_alone(
    make: Callable[[], tuple[Any, Any]], tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    config, processor = make()
    with torch.random.fork_rng():
        made = AutoModelForImageTextToText.from_config(config)
        if make is gemma3:  # whose projector would begin with zeros
            made.model.multi_modal_projector.mm_input_projection_weight.data.normal_()
        made.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    own = AutoModelForImageTextToText.from_pretrained(
        tmp_path, attn_implementation=attention_of(config, "eager"), dtype=torch.float32
    )
    vision = Vision(own, tmp_path)
    a, b, c = picture(1), picture(2, 50, 70), picture(3)
    samples = [
        sample(vision, [a, b], seed=1),
        sample(vision, [], seed=2),
        sample(vision, [b, a, a], seed=3),
        sample(vision, [a, b], seed=1, loss=9),
        sample(vision, [c, b], seed=1),
    ]
    ((micro_batch,),) = micro_batches(collate(samples), 4096)
    assert micro_batch.computed_tokens < micro_batch.tokens, "no prefix was shared"
    settings = LocalTrainer.Config(device="cpu", **SETTINGS, **WHOLE)
    rank = TrainerRank(TrainerSpec(LocalTrainer.sharding, settings, tmp_path, 1, 1.0), 0)
    rank.open(ONE_RANK, "")
    model = rank.sharding.trainable.model
    reader = PictureReader(Vision(model, tmp_path))
    found_N = rank.sharding.predict(to_device(micro_batch, torch.device("cpu"), reader=reader))
    order = micro_batch.numbers_M.tolist()
    expected_N = torch.cat([alone(own, vision, samples[number]) for number in order])
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=1e-5)
    found_N.sum().backward()  # type: ignore[no-untyped-call]
    expected_N.sum().backward()  # type: ignore[no-untyped-call]
    seen = set()
    for (name, parameter), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        if expected.grad is not None:
            # Against float64, both round gradients of Gemma 4 by up to 3e-5 of their size.
            atol = (5e-5 if make is gemma4 else 1e-5) * (1 + float(expected.grad.abs().max()))
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=atol)
            seen.add(part_of(name))
    assert seen == {"language", "tower", "projector"}
