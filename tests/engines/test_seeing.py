"""`engine=local` with a model that sees: what the family's own forward pass computes."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.conversation.eyes import Eyes
from agentrl.engines.local import LocalEngine
from agentrl.engines.openai import OpenAIEngine
from agentrl.errors import EngineError, ImagesRefusedError
from agentrl.models.vision import Vision, language_model
from agentrl.models.vision_families import FAMILIES
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.openai_server import serve_engine
from agentrl.testing.vision_models import VisionFamily, create_tiny_vision_model
from agentrl.tokens.arrays import ints
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import PlacedImage, shifted
from agentrl.trajectory import Completion
from tests.tiers import evenly

GREEDY = SamplingParams(temperature=0, max_tokens=5)
Context = tuple[list[int], tuple[PlacedImage, ...]]


def picture(seed: int, height: int = 64, width: int = 64) -> EncodedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return EncodedImage.of_pixels(pixels)


class Family:
    """A model as its family computes it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        self.folder = folder
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.vision = Vision(self.model, folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        eyes = Eyes.of_model(folder, self.tokenizer)
        assert eyes is not None
        self.eyes = eyes

    def context(self, *parts: Sequence[int] | EncodedImage) -> Context:
        """Tokens, with pictures among them."""
        ids: list[int] = []
        images = [part for part in parts if isinstance(part, EncodedImage)]
        for part in parts:
            if isinstance(part, EncodedImage):
                written = self.eyes.expanded(self.eyes.asked, [part])
                ids += [3, *self.tokenizer.encode(written, add_special_tokens=False), 4]
            else:
                ids += part
        return ids, self.eyes.placed(ints(ids), images)

    def continued(self, context: Context, count: int) -> tuple[list[int], list[float]]:
        """The most likely tokens after a context, each by a forward pass over all before it."""
        ids, images = [*context[0]], context[1]
        logprobs = []
        for _ in range(count):
            logits_V = self._logits(torch.tensor(ids), images)
            ids.append(int(logits_V.argmax()))
            logprobs.append(float(logits_V.log_softmax(-1)[ids[-1]]))
        return ids[-count:], logprobs

    def logprob(self, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> float:
        """The logprob of the last token."""
        *before, last = token_ids
        return float(self._logits(torch.tensor(before), images).log_softmax(-1)[last])

    @torch.no_grad()
    def _logits(self, tokens_T: Any, images: Sequence[PlacedImage]) -> Any:
        """The family's own classes, which know no placeholder that a model has sampled."""
        inside, embedded_1TE, more = (
            self.model.model,
            self.model.get_input_embeddings()(tokens_T[None]),
            {},
        )
        if images:
            inputs = self.vision.inputs([placed.image for placed in images]).tensors
            shows_1T = torch.zeros(1, len(tokens_T), dtype=torch.bool)
            for placed in images:
                span = slice(placed.start, placed.stop)
                shows_1T[0, span] = tokens_T[span] == self.vision.placeholder
            found = inside.get_image_features(**inputs, return_dict=True)
            features_FE = torch.cat([one.flatten(0, -2) for one in found.pooler_output])
            embedded_1TE = embedded_1TE.masked_scatter(shows_1T[..., None], features_FE)
            if "image_grid_thw" in inputs:
                more["position_ids"], _ = inside.get_rope_index(
                    tokens_T[None],
                    mm_token_type_ids=shows_1T.int(),
                    image_grid_thw=inputs["image_grid_thw"],
                )
            if deeper := getattr(found, "deepstack_features", None):
                more |= {
                    "visual_pos_masks": shows_1T,
                    "deepstack_visual_embeds": [
                        torch.cat(list(one)) if isinstance(one, list | tuple) else one
                        for one in deeper
                    ],
                }
            more |= of_gemma(self.model, tokens_T[None], embedded_1TE, shows_1T)
        decoder = language_model(self.model)
        if not images and hasattr(decoder, "get_per_layer_inputs"):
            more["per_layer_inputs"] = decoder.get_per_layer_inputs(tokens_T[None], None)
        states_1TE = decoder(inputs_embeds=embedded_1TE, use_cache=False, **more)[0]
        logits_V = self.model.lm_head(states_1TE[0, -1])
        if self.model.config.model_type != "gemma4":
            return logits_V
        cap = self.model.config.text_config.final_logit_softcapping
        return cap * torch.tanh(logits_V / cap)


def of_gemma(model: Any, tokens_1T: Any, embedded_1TE: Any, shows_1T: Any) -> dict[str, Any]:
    """The masks that Gemma makes of a context whose pictures are shown there, and inputs of layers
    that take padding for pictures.
    """
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.gemma4 import modeling_gemma4

    kind, text = model.config.model_type, model.config.get_text_config()
    own: Any = {"gemma3": modeling_gemma3, "gemma4": modeling_gemma4}.get(kind)
    if own is None:
        return {}
    found: dict[str, Any] = {}
    if kind == "gemma3" or text.use_bidirectional_attention == "vision":
        blocks_1T = own.get_block_sequence_ids_for_mask(shows_1T.int(), tokens_1T.device)
        found["attention_mask"] = own.create_masks_for_vision_model(
            text, embedded_1TE, None, None, None, blocks_1T
        )
    if kind == "gemma4":
        padded_1T = tokens_1T.masked_fill(shows_1T, text.pad_token_id)
        inputs = model.model.language_model.get_per_layer_inputs(padded_1T, None)
        found["per_layer_inputs"] = inputs
    return found


def request(name: str, context: Context, **more: Any) -> GenerateRequest:
    return GenerateRequest(name, ints(context[0]), GREEDY, images=context[1], **more)


def check(family: Family, context: Context, answer: Completion) -> None:
    tokens, logprobs = family.continued(context, len(answer.token_ids))
    assert answer.token_ids.tolist() == tokens
    np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5_vl",
        *(pytest.param(one, marks=pytest.mark.long) for one in FAMILIES if one != "qwen2_5_vl"),
    ],
)
def test_answers_are_those_of_the_familys_own_forward_pass(
    name: VisionFamily, tmp_path: Path
) -> None:
    create_tiny_vision_model(tmp_path / "model", name)
    family = Family(tmp_path / "model")
    one, other, wide = picture(0), picture(1), picture(2, 60, 130)
    contexts = [
        family.context([10, 20, 30], one, [40, 41]),
        family.context([10, 20, 30], other, [40, 41]),  # the same tokens
        family.context([17] * 9, wide, [13], one, [15]),
        family.context([19, 18, 17]),
    ]

    async def main() -> None:
        async with LocalEngine(LocalEngine.Config(dtype="float32"), tmp_path / "model") as engine:
            answers = await asyncio.gather(
                *(
                    engine.generate(request(f"{n}", c, session=f"{n}"))
                    for n, c in enumerate(contexts)
                )
            )
            for context, answer in zip(contexts, answers, strict=True):
                check(family, context, answer)
            for number, answer in enumerate(answers):
                begun = [*contexts[number][0], *answer.token_ids.tolist()]
                ids, images = family.context([33], wide, [12])
                known = len(begun)
                later = [*begun, *ids], (*contexts[number][1], *shifted(images, known))
                before = engine.stats().prefilled_tokens
                asked = request(f"later-{number}", later, session=f"{number}", known=known)
                check(family, later, await engine.generate(asked))
                # The new tokens, and the last one that was sampled.
                assert engine.stats().prefilled_tokens - before == len(ids) + 1
            # Without a session, what is cached is found by tokens and pictures.
            before = engine.stats().cached_tokens
            again = [*contexts[0][0], *answers[0].token_ids.tolist(), 33], contexts[1][1]
            check(family, again, await engine.generate(request("again", again)))
            assert engine.stats().cached_tokens == before
            # Other weights see other things in the same pictures.
            create_tiny_vision_model(tmp_path / "other", name, seed=1)
            await engine.update_weights(load_file(tmp_path / "other" / "model.safetensors"), 1)
            updated = Family(tmp_path / "other")
            check(updated, contexts[0], await engine.generate(request("new", contexts[0])))

    asyncio.run(main())


def test_a_gemma_4_that_looks_back_only_answers_as_its_family_does(tmp_path: Path) -> None:
    create_tiny_vision_model(tmp_path, "gemma4")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["use_bidirectional_attention"] = None
    file.write_text(json.dumps(config))
    family = Family(tmp_path)
    assert family.vision.both_ways == "nowhere"
    context = family.context([10, 20, 30], picture(0), [40, 41])

    async def main() -> None:
        async with LocalEngine(LocalEngine.Config(dtype="float32"), tmp_path) as engine:
            check(family, context, await engine.generate(request("small", context)))

    asyncio.run(main())


def test_a_model_without_eyes_and_tokens_of_others_are_refused(
    tiny_model_dir: Path, seeing_model_dir: Path
) -> None:
    placed = (PlacedImage(1, 2, picture(0)),)
    asked = GenerateRequest("r", ints([9, 5, 5, 9]), GREEDY, images=placed)

    async def ask(folder: Path) -> None:
        async with LocalEngine(LocalEngine.Config(dtype="float32"), folder) as engine:
            await engine.generate(asked)

    with pytest.raises(ImagesRefusedError, match="r has pictures in its tokens"):
        asyncio.run(ask(tiny_model_dir))
    with pytest.raises(EngineError, match="render it with the model's own renderer"):
        asyncio.run(ask(seeing_model_dir))


@pytest.mark.parametrize("name", evenly(FAMILIES, 3))
def test_an_engine_over_http_reads_pictures_as_it_does_itself(
    name: VisionFamily, tmp_path: Path
) -> None:
    create_tiny_vision_model(tmp_path, name)
    family = Family(tmp_path)
    asked = family.tokenizer.convert_tokens_to_ids(family.eyes.asked)
    pictures = [picture(1), picture(2, 100, 70)]
    ids = family.eyes.written_for(ints((10, 11, asked, 12, asked, 13)), pictures)
    images = family.eyes.placed(ids, pictures)
    assert family.eyes.asked_for(ids, images) == [10, 11, asked, 12, asked, 13]
    requests = [
        GenerateRequest("a", ints(ids), GREEDY, images=images, priority=2),
        GenerateRequest("b", ints(ids), SamplingParams(max_tokens=5), seed=3, images=images),
        GenerateRequest("c", ints((5, 6, 7)), GREEDY),
    ]

    async def main() -> None:
        local = LocalEngine(LocalEngine.Config(), tmp_path)
        async with (
            local,
            serve_engine(local, eyes=family.eyes) as url,
            OpenAIEngine(OpenAIEngine.Config(url=url), tmp_path) as engine,
        ):
            for request in requests:
                found, wanted = await engine.generate(request), await local.generate(request)
                assert found.token_ids.tolist() == wanted.token_ids.tolist()
                assert np.allclose(found.logprobs, wanted.logprobs, atol=1e-6)

    asyncio.run(main())


def test_an_engine_over_http_says_what_it_lacks_for_pictures(tmp_path: Path) -> None:
    create_tiny_vision_model(tmp_path, "qwen2_5_vl")
    family = Family(tmp_path)
    ids, images = family.context([10, 11], picture(1), [12])
    request = GenerateRequest("a", ints(ids), GREEDY, images=images)

    class Other(Eyes):
        """Those of a server whose processor makes more tokens of a picture."""

        def written_for(self, token_ids: Any, images: Any) -> Any:
            return ints([*super().written_for(token_ids, images), 9])

    other = Other.of_model(tmp_path, family.tokenizer)

    async def refusal(kind: type[Exception], eyes: Eyes | None, folder: Path | None) -> str:
        async with (
            LocalEngine(LocalEngine.Config(), tmp_path) as local,
            serve_engine(local, eyes=eyes) as url,
            OpenAIEngine(OpenAIEngine.Config(url=url), folder) as engine,
        ):
            with pytest.raises(kind) as raised:
                await engine.generate(request)
            return str(raised.value)

    async def main() -> None:
        blind = await refusal(ImagesRefusedError, None, tmp_path)
        assert "start vLLM with --enable-scale-out" in blind
        assert "reads text alone" in await refusal(ImagesRefusedError, family.eyes, None)
        count = len(ids)
        assert re.search(
            rf"made {count + 1} tokens of the prompt of a .* processor {count}: serve the folder",
            await refusal(EngineError, other, tmp_path),
        )

    asyncio.run(main())


def test_marks_that_merged_with_their_surroundings_are_refused(tmp_path: Path) -> None:
    create_tiny_vision_model(tmp_path, "gemma3")
    family = Family(tmp_path)
    eyes, asked = family.eyes, family.tokenizer.convert_tokens_to_ids(family.eyes.asked)
    ids = eyes.written_for(ints((10, asked, 13)), [picture(1)])
    images = eyes.placed(ids, [picture(1)])
    without_break = ints([*ids[: images[0].start - 2], *ids[images[0].start - 1 :]])
    with pytest.raises(ImagesRefusedError, match="not those that its family writes for it alone"):
        eyes.asked_for(without_break, shifted(images, -1))
