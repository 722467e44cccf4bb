"""Prefixes that samples share go through the model once, and change no logprob and no gradient."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import TrainingSample, collate
from agentrl.models.last_layer import compute_only_needed
from agentrl.tokens.arrays import IntArray, ints
from agentrl.trainers.compute import short_segments
from agentrl.trainers.compute.forward import (
    compute_logprobs_in,
    scaling_of,
    to_device,
    token_logprobs,
)
from agentrl.trainers.compute.prefixes import families, find_shared, in_tree_order
from agentrl.trainers.packing import MicroBatch, micro_batches
from tests.properties import examples
from tests.tiers import only
from tests.trainers.test_attention import FAMILIES, TEMPERATURE, alone, models

CPU = torch.device("cpu")
branching = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


def rows_of(listed: list[list[int]]) -> list[IntArray]:
    return [ints(row) for row in listed]


@given(branching)
def test_two_tokens_are_the_same_one_if_and_only_if_all_tokens_up_to_them_are_equal(listed):
    paths = [tuple(row[: end + 1]) for row in listed for end in range(len(row))]
    shared = find_shared(rows_of(listed))
    if shared is None:
        assert len(set(paths)) == len(paths)
        return
    assert len(shared.computed_S) == len(set(paths)) < len(paths)
    computed = [paths[place] for place in shared.computed_S]
    assert [computed[place] for place in shared.places_T] == paths


@given(branching, st.integers(1, 40))
def test_families_hold_each_row_once_and_count_as_no_more_than_the_limit(listed, tokens):
    rows = rows_of(listed)
    found = families(rows, in_tree_order(rows), tokens)
    assert sorted(n for family in found for n in family.numbers) == list(range(len(listed)))
    assert all(family.counted <= tokens or len(family.numbers) == 1 for family in found)
    for family in found:
        assert family.computed <= family.counted
        shared = find_shared([rows[number] for number in family.numbers])
        alone = sum(len(rows[number]) for number in family.numbers)
        assert family.computed == (alone if shared is None else len(shared.computed_S))


def group(
    prompts: int, members: int, *, prompt: int = 40, answer: int = 12, seed: int = 0
) -> list[TrainingSample]:
    """Groups that share instructions, with a prompt for each group and an answer for each member;
    half of it is loss.

    The last member of a group says what the first one says.
    """
    rng, samples = np.random.default_rng(seed), []
    instructions = rng.integers(0, 60, 10)
    for _ in range(prompts):
        question = rng.integers(0, 60, prompt - 10)
        answers = [rng.integers(0, 60, int(rng.integers(2, answer))) for _ in range(members - 1)]
        for said in [*answers, answers[0]]:
            ids = np.concatenate([instructions, question, said])
            loss = np.arange(len(ids)) >= len(ids) - len(said) // 2 - 1
            zeros = np.zeros(len(ids))
            samples.append(TrainingSample(ids, loss, zeros, zeros, np.where(loss, 0, -1), zeros))
    return samples


def logprobs_of(model: Any, batch: MicroBatch) -> torch.Tensor:
    compute_logprobs_in(model.get_output_embeddings(), scaling_of(model, TEMPERATURE))
    compute_only_needed(model)
    return token_logprobs(model, to_device(batch, CPU))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_samples_that_share_prefixes_have_the_logprobs_and_gradients_that_each_has_alone(
    family, checkpointed
):
    compare_with_each_alone(family, checkpointed=checkpointed, prompt=40)


def compare_with_each_alone(family: str, *, checkpointed: bool, prompt: int) -> None:
    plain, shared = models(family)
    if checkpointed:
        if hasattr(shared, "activation_checkpointing_enable"):  # newer versions of transformers
            shared.activation_checkpointing_enable({"use_reentrant": False})
        else:
            shared.gradient_checkpointing_enable({"use_reentrant": False})
        shared.train()
    ((batch,),) = micro_batches(collate(group(2, 4, prompt=prompt)), 10**6)
    assert batch.computed_tokens < 0.4 * batch.tokens
    wanted_N, found_N = alone(plain, batch), logprobs_of(shared, batch)
    assert torch.allclose(found_N, wanted_N, atol=1e-5)
    directions_N = torch.from_numpy(np.random.default_rng(1).normal(size=len(wanted_N)))
    for logprobs_N in (wanted_N, found_N):
        (logprobs_N * directions_N).sum().backward()
    for (name, one), other in zip(plain.named_parameters(), shared.parameters(), strict=True):
        if one.grad is not None:
            assert torch.allclose(
                one.grad, other.grad, atol=1e-5 * max(1.0, float(one.grad.abs().max()))
            ), name


def test_on_cpus_long_prefixes_that_samples_share_ask_once_for_what_they_see(monkeypatch):
    asked: list[int] = []
    fused = short_segments._FUSED

    def counted(query, *args, **options):
        asked.append(query.shape[0] * query.shape[2])
        return fused(query, *args, **options)

    monkeypatch.setattr(short_segments, "_FUSED", counted)
    compare_with_each_alone("Qwen3Config", checkpointed=False, prompt=390)
    # Two groups of four, whose prompts are three pieces and a little: of three pieces, each group
    # asks once, and of the last one each sample does.
    assert sum(asked) < (2 * 3 + 8) * short_segments.SHORT_PIECE


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
@pytest.mark.parametrize("family", ["Gemma2Config", "GptOssConfig"])
def test_one_kernel_for_caps_and_sinks_takes_shared_prefixes(family, flex_here):
    test_samples_that_share_prefixes_have_the_logprobs_and_gradients_that_each_has_alone(
        family, checkpointed=True
    )
    assert flex_here


@cache
def trained(family: str) -> tuple[Any, Any]:
    plain, shared = models(family)
    compute_logprobs_in(shared.get_output_embeddings(), scaling_of(shared, TEMPERATURE))
    compute_only_needed(shared)
    return plain, shared


def entropies_alone(model: Any, batch: MicroBatch) -> torch.Tensor:
    """The entropies of the distributions of all loss tokens, by transformers, each sample by
    itself.
    """
    found, first = [], 0
    for length in batch.samples.lengths_M:
        ids, loss = (
            one[first : first + length]
            for one in (batch.samples.tokens_S, batch.samples.loss_mask_S)
        )
        logits = (
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
            .logits[0]
            .float()
        )
        logprobs_TV = (logits / TEMPERATURE).log_softmax(-1)[:-1][torch.from_numpy(loss[1:].copy())]
        found.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1))
        first += int(length)
    return torch.cat(found)


@st.composite
def ragged(draw: st.DrawFn) -> list[TrainingSample]:
    """Samples that go on from parts of others, or from all of one; of one token and more, some
    without loss.
    """
    samples: list[TrainingSample] = []
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.sampled_from([np.zeros(0, np.int64), *(one.token_ids for one in samples)]))
        taken = start[: draw(st.integers(0, len(start)))]
        more = rng.integers(0, 60, draw(st.integers(0 if len(taken) else 1, 24)))
        ids = np.concatenate([taken, more]).astype(np.int64)
        loss = (rng.random(len(ids)) < draw(st.sampled_from([0.0, 0.3, 1.0]))) & (
            np.arange(len(ids)) > 0
        )
        zeros = np.zeros(len(ids))
        samples.append(TrainingSample(ids, loss, zeros, zeros, np.where(loss, 0, -1), zeros))
    last = rng.integers(0, 60, 3)
    samples.append(
        TrainingSample(last, [False, True, True], [0.0] * 3, [0.0] * 3, [-1, 0, 0], [0] * 3)
    )
    return samples


@pytest.mark.parametrize(
    "family", only(["Qwen3Config", "Gemma2Config", "GptOssConfig"], "GptOssConfig")
)
@examples(30)  # of each family
@given(samples=ragged(), tokens=st.sampled_from([1, 20, 10**6]))
def test_ragged_samples_have_the_logprobs_entropies_and_gradients_that_each_has_alone(
    family, samples, tokens
):
    plain, shared = trained(family)
    for model in (plain, shared):
        model.zero_grad()
    for (batch,) in micro_batches(collate(samples), tokens):
        wanted_2N = torch.stack([alone(plain, batch), entropies_alone(plain, batch)])
        found_2N = token_logprobs(shared, to_device(batch, CPU), entropy=True)
        assert torch.allclose(found_2N, wanted_2N, atol=1e-5)
        directions_2N = torch.from_numpy(
            np.random.default_rng(1).normal(size=wanted_2N.shape)
        ).float()
        for predicted_2N in (wanted_2N, found_2N):
            (predicted_2N * directions_2N).sum().backward()
    for (name, one), other in zip(plain.named_parameters(), shared.parameters(), strict=True):
        if one.grad is not None:
            assert torch.allclose(
                one.grad, other.grad, atol=1e-5 * max(1.0, float(one.grad.abs().max()))
            ), name


def test_the_last_layer_computes_only_tokens_before_loss_tokens():
    _, model = models("Qwen3Config")
    seen: list[int] = []
    model.model.layers[-1].mlp.gate_proj.register_forward_hook(
        lambda layer, args, out: seen.append(out.shape[1])
    )
    ((batch,),) = micro_batches(collate(group(1, 4)), 10**6)
    sample = to_device(batch, CPU)
    logprobs_of(model, batch)
    assert seen[-1] == len(sample.predictors_N.unique()) < 0.5 * batch.computed_tokens


def test_members_of_a_group_are_packed_together_and_count_what_they_do_not_share():
    samples = group(8, 4, prompt=100)
    order = np.random.default_rng(0).permutation(len(samples))
    rows = micro_batches(collate([samples[number] for number in order]), 200)
    found = [one for (one,) in rows]
    assert len(found) <= 8
    assert all(one.computed_tokens <= 200 for one in found)
    assert sum(one.computed_tokens for one in found) < 0.4 * sum(
        len(sample.token_ids) for sample in samples
    )


def test_samples_without_a_common_prefix_are_computed_as_they_are():
    assert find_shared(rows_of([[1, 2, 3], [2, 2, 3], [3]])) is None
