"""Fixtures of trainers."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from agentrl.trainers.compute import attention, flex
from tests.trainers.shared_processes import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """The processes of all ranks of a module."""
    started = Processes()
    yield started
    for process in started.processes:
        asyncio.run(process.stop())


@pytest.fixture
def flex_here(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of torch's flex attention, which runs here in float32, uncompiled. torch refuses to
    differentiate it on CPUs, where only its compiled kernel has no backward pass.
    """
    calls = []

    def kernel(*inputs: Any, **options: Any) -> Any:
        calls.append(options)
        return torch_flex.flex_attention(*inputs, **options)

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *inputs: None)
    monkeypatch.setattr(attention, "FLASH_DEVICE", "cpu")
    monkeypatch.setattr(attention, "FLASH_PRECISIONS", (torch.float32,))
    monkeypatch.setattr(attention, "_flash_kernel", lambda device: None)
    monkeypatch.setattr(flex, "SMALLEST_HEAD", 8)
    monkeypatch.setattr(flex, "flex_kernel", lambda device: kernel)
    return calls
