"""Ranks that see the same GPUs take one each, whatever their numbers."""

import pytest
import torch
import torch.distributed as dist

from agentrl.trainers.rank import process_group


def test_the_ranks_of_a_machine_take_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
    store = dist.HashStore()  # type: ignore[attr-defined]
    # Ranks go to two nodes in turn, so those of a node have every other number.
    devices = [process_group._own_gpu(store, f"node {rank % 2}") for rank in range(4)]
    assert devices == [torch.device("cuda", number) for number in (0, 0, 1, 1)]
