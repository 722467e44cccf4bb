"""The exact probability of answers, against brute force and against what an engine samples."""

import asyncio
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.conversation.context import LastK
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.engines.local import LocalEngine
from agentrl.errors import ConfigError
from agentrl.oracles.exact import Question, answer_probabilities, completions, prompt_of
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import floats, ints
from agentrl.trainers.local import LocalTrainer
from agentrl.trajectory import Completion, Message

TEMPERATURE = 0.2  # a model at random is nearly indifferent between its tokens
ASKED = (Message("system", "Answer with one word."), Message("user", "left or right?"))


@pytest.fixture(scope="module")
def renderer(shallow_model_dir: Path) -> TemplateRenderer:
    return TemplateRenderer.of_model(shallow_model_dir)


def probabilities(
    model: Path, questions: list[Question], max_tokens: int | None = None
) -> list[list[float]]:
    async def main() -> list[list[float]]:
        config = LocalTrainer.Config(device="cpu")
        async with LocalTrainer(config, model, total_steps=1, temperature=TEMPERATURE) as trainer:
            return await answer_probabilities(
                trainer, TemplateRenderer.of_model(model), questions, max_tokens=max_tokens
            )

    return asyncio.run(main())


def by_brute_force(model_dir: Path, renderer: TemplateRenderer) -> dict[str, list[float]]:
    """The probability of each spelling of all texts of at most two tokens, from the model's own
    logits.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompt = torch.from_numpy(prompt_of(renderer, ASKED).astype("int64"))
    size = len(model.get_output_embeddings().weight)
    rows = torch.cat([prompt.expand(size, -1), torch.arange(size)[:, None]], dim=1)
    with torch.no_grad():
        logits = model(input_ids=rows).logits[:, -2:].double() / TEMPERATURE
    first, second = logits[0, 0].softmax(0).tolist(), logits[:, 1].softmax(1).tolist()
    found: dict[str, list[float]] = defaultdict(list)
    for one, chance in enumerate(first):
        if one in renderer.stop_token_ids:
            found[""].append(chance)
            continue
        for two, then in enumerate(second[one]):
            found[renderer.answer_text(ints([one, two]))].append(chance * then)
    return found


def test_the_probability_of_a_text_is_the_sum_over_all_its_spellings(
    shallow_model_dir: Path, renderer: TemplateRenderer
) -> None:
    wanted = by_brute_force(shallow_model_dir, renderer)
    assert sum(map(sum, wanted.values())) == pytest.approx(1)
    texts = [text for text in wanted if text.isascii()]
    likely = sorted(texts, key=lambda text: -sum(wanted[text]))[:100]
    several = sorted(texts, key=lambda text: -len(wanted[text]))[:50]
    assert len(wanted[several[0]]) > 2
    asked = ["", "left", *likely, *several]
    (found,) = probabilities(shallow_model_dir, [Question(ASKED, asked)], max_tokens=2)
    assert found == pytest.approx([sum(wanted[text]) for text in asked], rel=1e-4, abs=1e-12)


def test_answers_are_sampled_as_often_as_they_are_likely(
    shallow_model_dir: Path, renderer: TemplateRenderer
) -> None:
    """Pearson's test, for each text that is expected five times or more, and for all others
    together.
    """
    count, longest = 2000, 2
    later = (*ASKED, Message("assistant", "left"), Message("user", "up or down?"))

    async def sampled(messages: tuple[Message, ...]) -> Counter[str]:
        sampling = SamplingParams(
            max_tokens=longest, temperature=TEMPERATURE, stop_token_ids=renderer.stop_token_ids
        )
        prompt_ids = prompt_of(renderer, messages)
        config = LocalEngine.Config(device="cpu", max_batch=256)
        async with LocalEngine(config, shallow_model_dir) as engine, asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(
                    engine.generate(GenerateRequest(f"{n}", prompt_ids, sampling, seed=n))
                )
                for n in range(count)
            ]
        return Counter(renderer.answer_text(task.result().token_ids) for task in asked)

    counts = asyncio.run(sampled(later))
    texts = [text for text, _ in counts.most_common(60) if text.isascii()]
    (found,) = probabilities(shallow_model_dir, [Question(later, texts)], max_tokens=longest)
    likely = {text: p for text, p in zip(texts, found, strict=True) if count * p >= 5}
    assert len(likely) > 5
    expected = [*(count * p for p in likely.values()), count * (1 - sum(likely.values()))]
    observed = [*(counts[text] for text in likely), count - sum(counts[text] for text in likely)]
    distance = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(likely)
    assert distance < freedom + 3 * (2 * freedom) ** 0.5


def test_an_answer_that_is_cut_needs_no_stop_token(renderer: TemplateRenderer) -> None:
    (stop,) = renderer.stop_token_ids
    one, two = renderer.encode("lef").tolist(), renderer.encode("t").tolist()
    whole = [completion.tolist() for completion in completions(renderer, "left")]
    assert [*one, *two, stop] in whole
    assert [*renderer.encode("left").tolist(), stop] in whole
    assert all(completion[-1] == stop for completion in whole)
    longest = len(one) + len(two)
    cut = [completion.tolist() for completion in completions(renderer, "left", longest)]
    assert [*one, *two] in cut
    assert [*one, *two, stop] not in cut
    assert max(map(len, cut)) == longest
    assert [completion.tolist() for completion in completions(renderer, "left", 1)] == [
        [renderer.encode("left")[0]]
    ]
    assert completions(renderer, "left right", 1) == []
    assert [completion.tolist() for completion in completions(renderer, "")] == [[stop]]


def test_a_text_with_too_many_spellings_is_refused(renderer: TemplateRenderer) -> None:
    with pytest.raises(
        ConfigError, match=r"'left right.*' can be spelled by more than 4096 token sequences"
    ):
        completions(renderer, "left right up down " * 4)
    with pytest.raises(ConfigError, match="characters beyond ASCII"):
        completions(renderer, "gauche ou à droite")


def test_a_prompt_is_the_one_of_an_episode(renderer: TemplateRenderer) -> None:
    conversation = renderer.conversation()
    conversation.prompt(ASKED)
    answer = renderer.answer_ids("left")
    conversation.answer(
        Completion(answer, floats([0] * len(answer)), ints([0] * len(answer)), "stop")
    )
    shown = conversation.prompt([Message("user", "up or down?")])
    messages = (*ASKED, Message("assistant", "left"), Message("user", "up or down?"))
    assert prompt_of(renderer, messages).tolist() == shown.ids.tolist()
    more = (*messages, Message("assistant", "up"), Message("user", "in or out?"))
    seen = renderer.decode(prompt_of(renderer, more, LastK(turns=1)))
    assert "Answer with one word." in seen
    assert "in or out?" in seen
    assert "up" in seen.split("left or right?")[1]
    assert "left" not in seen.split("left or right?")[1]
    with pytest.raises(
        ConfigError, match="a question ends with a message that the model is to answer"
    ):
        prompt_of(renderer, messages[:-1])
