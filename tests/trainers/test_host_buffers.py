"""Host memory of a sleeping trainer: the same numbers after each cycle, at the same addresses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from agentrl.trainers.rank.host_buffers import HostBuffers, local
from agentrl.trainers.rank.optimizer import adamw, make_state
from agentrl.trainers.settings import TrainerSettings

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two layers, a head that is the embedding, and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 16)
        self.layers = nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 16))
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, tokens_B: Tensor) -> Tensor:
        logits_BV: Tensor = self.head(self.layers(self.embedding(tokens_B))) * self.scale[0]
        return logits_BV


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    moments = {
        f"{number} {name}": value
        for number, state in enumerate(optimizer.state.values())
        for name, value in state.items()
        if value.ndim
    }
    return {**model.state_dict(keep_vars=True), **moments}


def addresses(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: local(tensor).data_ptr() for name, tensor in tensors.items()}


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: local(tensor).clone() for name, tensor in tensors.items()}


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def whole(model: Tied) -> None:
    """Leave all weights whole."""


def sharded(model: Tied) -> None:
    """Shard the weights as FSDP does."""
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.layers, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    ("moments", "shard"), [("float32", whole), ("int8", whole), ("float32", sharded)]
)
@pytest.mark.usefixtures("process_group")
def test_a_trainer_sleeps_at_the_same_addresses_and_goes_on_with_the_same_bytes(
    moments: Any, shard: Any
) -> None:
    settings = TrainerSettings(lr=1e-2, moments=moments)

    def train(host: HostBuffers | None) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(0)
            model = Tied()
        shard(model)
        optimizer = adamw(model, settings)
        asleep = []
        for _ in range(4):
            if host is not None:
                before = copies(tensors_of(model, optimizer))
                awake = addresses(tensors_of(model, optimizer))
                host.sleep(model, optimizer)
                held = tensors_of(model, optimizer)
                asleep.append(addresses(held))
                assert all(torch.equal(before[name], local(held[name])) for name in before)
                assert not {*awake.values()} & {*asleep[-1].values()}
                host.wake(model, optimizer, CPU)
                woken = tensors_of(model, optimizer)
                assert all(torch.equal(before[name], local(woken[name])) for name in before)
                assert not {*addresses(woken).values()} & {*asleep[-1].values()}
                assert model.head.weight is model.embedding.weight
            step(model, optimizer)
        return copies(tensors_of(model, optimizer)), asleep

    undisturbed, _ = train(None)
    slept, asleep = train(host := HostBuffers())
    assert all(torch.equal(undisturbed[name], slept[name]) for name in undisturbed)
    # Moments come with the first step; from then on nothing moves.
    weights, *later = asleep
    assert all(weights.items() <= cycle.items() for cycle in later)
    assert len(later[0]) > len(weights)
    assert later[0] == later[1] == later[2]
    head = slept.pop("head.weight")  # it is the embedding
    assert host.nbytes == sum(tensor.nbytes for tensor in slept.values())
    assert torch.equal(head, slept["embedding.weight"])


def test_what_a_checkpoint_brings_to_a_sleeping_trainer_wakes_with_it() -> None:
    model = Tied()
    optimizer, host = adamw(model, TrainerSettings()), HostBuffers()
    host.sleep(model, optimizer)
    make_state(optimizer)  # moments, as from a checkpoint
    with torch.no_grad():
        model.get_parameter("layers.0.weight").fill_(7.0)
    host.sleep(model, optimizer)  # changes nothing
    host.wake(model, optimizer, CPU)
    assert float(model.get_parameter("layers.0.weight").detach().min()) == 7.0
    step(model, optimizer)
    trained = model.get_parameter("layers.0.weight").detach().clone()
    host.wake(model, optimizer, CPU)  # nor does this
    assert torch.equal(model.get_parameter("layers.0.weight"), trained)


def test_a_trainer_that_cannot_get_memory_to_wake_sleeps_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Tied()
    optimizer, host = adamw(model, TrainerSettings()), HostBuffers()
    host.sleep(model, optimizer)
    asleep = addresses(tensors_of(model, optimizer))

    def out_of_memory(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            host.wake(model, optimizer, CPU)
    assert addresses(tensors_of(model, optimizer)) == asleep
    host.wake(model, optimizer, CPU)
    step(model, optimizer)
