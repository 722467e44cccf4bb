"""Logprobs of an output head, in pieces, have the values and the gradients of the whole logits."""

import pytest
import torch
from torch import Tensor

from agentrl.trainers.compute import logprobs
from agentrl.trainers.compute.logprobs import (
    LOGITS_AT_ONCE,
    Scaling,
    affordable_logits,
    linear_logprobs,
)

TOKENS, HIDDEN, VOCABULARY = 37, 16, 50


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weights, bias, targets."""
    torch.manual_seed(0)
    hidden_NH, weight_VH = torch.randn(TOKENS, HIDDEN), 0.3 * torch.randn(VOCABULARY, HIDDEN)
    targets_N = torch.randint(0, VOCABULARY, (TOKENS,))
    return hidden_NH, weight_VH, torch.randn(VOCABULARY), targets_N


def supports(targets_N: Tensor) -> Tensor:
    """Every second token was sampled from five ids."""
    support_NS = torch.full((TOKENS, 6), -1)
    for number in range(0, TOKENS, 2):
        others = torch.randperm(VOCABULARY)
        others = others[others != targets_N[number]][:4]
        support_NS[number, :5] = torch.cat([targets_N[number : number + 1], others])
    return support_NS


def reference(
    head: tuple[Tensor, Tensor, Tensor],
    targets_N: Tensor,
    scaling: Scaling,
    support_NS: Tensor | None = None,
) -> Tensor:
    """Logprobs and entropies from whole logits, in float64; `head` is the hidden states, the
    weights and the bias.
    """
    hidden_NH, weight_VH, bias_V = head
    logits_NV = (hidden_NH.double() @ weight_VH.double().T + bias_V.double()) * scaling.factor
    if scaling.cap is not None:
        logits_NV = scaling.cap * torch.tanh(logits_NV / scaling.cap)
    logits_NV = logits_NV / scaling.temperature
    if support_NS is not None:
        kept_NV = torch.ones(TOKENS, VOCABULARY, dtype=torch.bool)
        for number, ids in enumerate(support_NS):
            if ids[0] >= 0:
                kept_NV[number] = False
                kept_NV[number, ids[ids >= 0]] = True
        logits_NV = logits_NV.masked_fill(~kept_NV, float("-inf"))
    logprobs_NV = logits_NV.log_softmax(1)
    entropies_N = -(logprobs_NV.exp() * logprobs_NV.masked_fill(logprobs_NV.isinf(), 0)).sum(1)
    return torch.stack([logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropies_N])


@pytest.mark.parametrize("pieces", [1, 3, 37])
@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    "scaling", [Scaling(), Scaling(0.7), Scaling(0.7, 1.3), Scaling(0.7, 1.3, 2.0)]
)
def test_values_and_gradients_are_those_of_the_whole_logits(
    scaling: Scaling, supported: bool, pieces: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", -(-TOKENS // pieces) * VOCABULARY)
    *tensors, targets_N = inputs()
    support_NS = supports(targets_N) if supported else None
    directions_2N = (
        torch.randn(2, TOKENS)
        if entropy
        else torch.stack([torch.randn(TOKENS), torch.zeros(TOKENS)])
    )
    found, wanted = [], []
    for results, exact in ((found, False), (wanted, True)):
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        hidden_NH, weight_VH, bias_V = own
        if exact:
            found_2N = reference((hidden_NH, weight_VH, bias_V), targets_N, scaling, support_NS)
        else:
            found_2N = linear_logprobs(
                hidden_NH,
                weight_VH,
                targets_N,
                scaling,
                bias_V=bias_V,
                support_NS=support_NS,
                entropy=entropy,
            )
        shown = found_2N if entropy or not exact else found_2N[0]
        (shown * (directions_2N if entropy else directions_2N[0])).sum().backward()
        results += [shown.detach().float(), *(tensor.grad for tensor in own)]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden_NH, weight_VH, _, targets_N = inputs()
    hidden_NH.requires_grad_()
    linear_logprobs(hidden_NH, weight_VH, targets_N, Scaling()).sum().backward()
    assert hidden_NH.grad is not None
    assert weight_VH.grad is None


def test_a_head_in_bfloat16_sums_its_gradient_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", VOCABULARY)  # a token at a time
    hidden_NH, weight_VH, _, targets_N = inputs()
    low_VH = weight_VH.bfloat16().requires_grad_()
    linear_logprobs(hidden_NH.bfloat16(), low_VH, targets_N, Scaling()).sum().backward()
    exact_VH = weight_VH.bfloat16().float().requires_grad_()
    reference((hidden_NH.bfloat16(), exact_VH, torch.zeros(VOCABULARY)), targets_N, Scaling())[
        0
    ].sum().backward()
    assert exact_VH.grad is not None
    assert low_VH.grad is not None
    assert torch.allclose(low_VH.grad.float(), exact_VH.grad.float(), atol=0.03, rtol=0.02)


def test_pieces_are_larger_where_a_gpu_has_memory_and_never_take_more_than_a_quarter() -> None:
    vocabulary, gib = 151_936, 2**30
    assert affordable_logits(0, vocabulary) == LOGITS_AT_ONCE
    assert affordable_logits(80 * gib, vocabulary) == 16 * LOGITS_AT_ONCE, "3,500 of 4,096 tokens"
    assert affordable_logits(80 * gib, 4096) == LOGITS_AT_ONCE, "4,096 tokens have fewer"
    for free in range(0, 40 * gib, gib):
        extra = affordable_logits(free, vocabulary)
        assert extra == LOGITS_AT_ONCE or extra * 10.5 <= free / 4
        assert extra <= affordable_logits(free + gib, vocabulary)
