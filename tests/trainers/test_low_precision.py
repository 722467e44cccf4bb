"""Moments of two bytes or one: their cost, their effect, and that they are saved exactly."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from agentrl.testing.trainers import (
    LOSS,
    TrainerCase,
    check_refuses_non_finite,
    check_resume,
    random_batches,
)
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.rank.low_precision import LowPrecisionAdamW, decode, encode
from agentrl.trainers.rank.optimizer import adamw
from agentrl.trainers.settings import MomentType, TrainerSettings
from tests.properties import examples
from tests.trainers.shared_processes import Processes

LOW: tuple[MomentType, ...] = ("bfloat16", "int8")
CASE = TrainerCase(lr=1e-3)


def blocks(seed: int, signed: bool) -> Tensor:
    """Blocks of 16 numbers of very different sizes, some zero, some beyond what codes can tell."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-30, 10, (50, 1), generator=generator)
    spread = 10.0 ** -torch.randint(0, 9, (50, 16), generator=generator)
    values = (
        sizes
        * spread
        * torch.randn(50, 16, generator=generator)
        * (torch.rand(50, 1, generator=generator) > 0.1)
    )
    return (values if signed else values.abs()).view(-1)


@given(seed=st.integers(0, 2**31), signed=st.booleans())
@examples(200)
def test_what_was_decoded_is_coded_as_it_was(seed: int, signed: bool) -> None:
    codes, scales = encode(blocks(seed, signed), 16, signed)
    decoded = decode(codes, scales, signed)
    again, same_scales = encode(decoded, 16, signed)
    assert torch.equal(decode(again, same_scales, signed), decoded)
    assert torch.equal(same_scales, scales)
    if not signed:  # so it is written to a checkpoint
        roots, root_scales = encode(decoded.square().sqrt(), 16, signed)
        assert torch.equal(roots, again)
        assert torch.equal(root_scales, scales)


@given(seed=st.integers(0, 2**31), signed=st.booleans())
def test_codes_are_near_what_they_stand_for_and_exact_where_it_is_largest(
    seed: int, signed: bool
) -> None:
    values = blocks(seed, signed)
    decoded = decode(*encode(values, 16, signed), signed).view(-1, 16)
    values = values.view(-1, 16)
    largest = values.abs().amax(1, keepdim=True)
    kept = (largest >= 1e-12).flatten()
    at_peak = values.abs().argmax(1, keepdim=True)
    assert torch.equal(decoded.gather(1, at_peak)[kept], values.gather(1, at_peak)[kept])
    assert torch.all((decoded - values).abs() <= 0.008 * largest + 1e-12)


@pytest.mark.parametrize(("moments", "error"), [("bfloat16", 0.005), ("int8", 0.03)])
def test_parameters_go_nearly_where_float32_moments_take_them(
    moments: MomentType, error: float
) -> None:
    def trained(chosen: MomentType) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        module = torch.nn.Linear(256, 64)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = adamw(module, TrainerSettings(lr=1e-2, weight_decay=0.1, moments=chosen))
        start = torch.cat(
            [parameter.detach().clone().view(-1) for parameter in module.parameters()]
        )
        for _ in range(30):
            for parameter in module.parameters():
                scale = 10.0 ** torch.linspace(-4, 0, parameter.numel()).view(parameter.shape)
                parameter.grad = scale * (0.3 + torch.randn(parameter.shape, generator=generator))
            optimizer.step()
        return torch.cat([parameter.detach().view(-1) for parameter in module.parameters()]) - start

    exact, low = trained("float32"), trained(moments)
    assert not torch.equal(low, exact)
    assert float((low - exact).norm() / exact.norm()) < error


@pytest.mark.parametrize("moments", LOW)
def test_moments_take_the_bytes_that_are_planned(moments: MomentType) -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 256, bias=False)
    )
    settings = TrainerSettings(moments=moments)
    optimizer = adamw(module, settings)
    assert isinstance(optimizer, LowPrecisionAdamW)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim
    )
    assert held == 2 * settings.layout().moment_bytes * sum(
        parameter.numel() for parameter in module.parameters()
    )


def test_settings_that_low_precision_cannot_follow_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"write betas of at most 0\.99, or moments: int8"):
        TrainerSettings(moments="bfloat16", betas=(0.9, 0.999))
    with pytest.raises(ValidationError, match="write trainer: fsdp"):
        DeepSpeedTrainer.Config(moments="int8")


def local(model: Path, moments: MomentType, **settings: Any) -> LocalTrainer:
    config = LocalTrainer.Config(**CASE.settings, device="cpu", moments=moments, **settings)
    return LocalTrainer(config, model, total_steps=CASE.total_steps, temperature=CASE.temperature)


@pytest.mark.parametrize("moments", LOW)
def test_a_trainer_with_low_moments_resumes_exactly_and_refuses_what_is_not_finite(
    moments: MomentType, shallow_model_dir: Path, tmp_path: Path
) -> None:
    def make(model: Path, case: TrainerCase) -> LocalTrainer:
        config = LocalTrainer.Config(**case.settings, device="cpu", moments=moments)
        return LocalTrainer(
            config, model, total_steps=case.total_steps, temperature=case.temperature
        )

    asyncio.run(check_resume(make, shallow_model_dir, tmp_path))
    asyncio.run(check_refuses_non_finite(make, shallow_model_dir))


@pytest.mark.long
@pytest.mark.parametrize("moments", LOW)
def test_two_ranks_save_the_moments_that_one_process_takes_up_and_saves_as_they_were(
    moments: MomentType, processes: Processes, shallow_model_dir: Path, tmp_path: Path
) -> None:
    batches = random_batches(shallow_model_dir, 3)

    def of_two() -> GroupTrainer:
        config = FsdpTrainer.Config(**CASE.settings, world_size=2, moments=moments)
        return FsdpTrainer(
            config,
            shallow_model_dir,
            total_steps=10,
            temperature=CASE.temperature,
            start=processes,
        )

    async def main() -> None:
        async with of_two() as trainer:
            for batch in batches[:2]:
                await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
            await trainer.save(tmp_path / "two")
            await trainer.step(batches[2], LOSS, float(batches[2].num_loss_tokens))
            expected = {name: weight.clone() for name, weight in (await trainer.weights()).items()}
        async with local(shallow_model_dir, moments) as trainer:
            await trainer.load(tmp_path / "two")
            await trainer.save(tmp_path / "one")
            await trainer.step(batches[2], LOSS, float(batches[2].num_loss_tokens))
            for name, weight in (
                await trainer.weights()
            ).items():  # equal moments: as near as float32 ones come
                torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)
        async with of_two() as trainer:
            await trainer.load(tmp_path / "one")
            await trainer.save(tmp_path / "again")

    asyncio.run(main())
    for saved in sorted((tmp_path / "two").rglob("*.safetensors")):
        path = saved.relative_to(tmp_path / "two")
        for other in ("one", "again"):
            assert saved.read_bytes() == (tmp_path / other / path).read_bytes(), path
