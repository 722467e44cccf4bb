"""Host memory in which a trainer's tensors lie while it sleeps.

It is allocated once and kept while the trainer is awake, too. Where there is CUDA it is
page-locked: copies from and to a GPU then run at the speed of the link, several times as fast as
with pageable memory that each time is new.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import transform_subclass

logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 512
"""Where tensors begin: a multiple of this, as in torch's own allocator of GPUs."""
_PORTABLE = 1
"""CUDA's flag for memory that is page-locked for all devices of the process."""


class HostBuffers:
    """Host memory for the weights, the buffers and the moments of a module.

    A tensor lies at the same address each time. Memory for those that have none yet is allocated in
    one piece: moments come with the first step.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._asleep = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that have a place."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def sleep(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Move weights, buffers and moments into host memory. Counts of steps stay where the
        optimizer keeps them. If this fails, nothing has moved.
        """
        if self._asleep:
            return
        tensors = _tensors(module, optimizer)
        self._reserve(tensors)
        for name, tensor in tensors.items():
            self._buffers[name].copy_(local(tensor), non_blocking=True)
        _synchronize()  # the copies run beside this thread, and read what is replaced here
        _replace(module, optimizer, self._buffers.__getitem__)
        self._asleep = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # gives the freed memory to other processes

    def wake(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        """Move everything that has slept to a device. The host memory is kept for the next time.
        If this fails, nothing has moved.
        """
        if not self._asleep:
            return
        # Not only what `sleep` has moved: a checkpoint may have brought moments since.
        woken = {
            name: local(tensor).to(device, non_blocking=True, copy=True)
            for name, tensor in _tensors(module, optimizer).items()
        }
        _synchronize()
        _replace(module, optimizer, woken.__getitem__)
        self._asleep = False

    def _reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate memory for tensors that have none, or that have changed their shape or type."""
        new: dict[str, Tensor] = {}
        starts: dict[str, int] = {}
        size = 0
        for name, whole in tensors.items():
            tensor, buffer = local(whole), self._buffers.get(name)
            if buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype):
                continue
            new[name], starts[name] = tensor, size
            size += math.ceil(tensor.nbytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if not new:
            return
        memory = torch.empty(size, dtype=torch.uint8)
        if torch.cuda.is_available():
            _lock_pages(memory)
        for name, tensor in new.items():
            piece = memory[starts[name] : starts[name] + tensor.nbytes]
            self._buffers[name] = piece.view(tensor.dtype).view(tensor.shape)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank has."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of a module and an optimizer by names that stay the same."""
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value.ndim:
                tensors[f"{name}/{key}"] = value
    return tensors


def _replace(
    module: nn.Module, optimizer: torch.optim.Optimizer, replacement: Callable[[str], Tensor]
) -> None:
    """Let all tensors of a module and an optimizer have the memory of their replacements."""
    names = {id(tensor): name for name, tensor in _tensors(module, optimizer).items()}

    def replaced(tensor: Any) -> Any:
        new = replacement(names[id(tensor)])
        if not isinstance(tensor, DTensor):
            return new
        # The mesh, the other inner part, stays.
        return transform_subclass(  # type: ignore[no-untyped-call]
            tensor, lambda part, inner: new if part == "_local_tensor" else inner
        )

    for state in optimizer.state.values():
        state.update({key: replaced(value) for key, value in state.items() if value.ndim})
    module._apply(replaced)  # type: ignore[no-untyped-call]


def _lock_pages(memory: Tensor) -> None:
    """Page-lock memory as it is. `pin_memory` would round its size up to a power of two."""
    cuda: Any = torch.cuda  # it has no types
    code = int(cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if code:
        logger.warning(
            "CUDA could not page-lock %.1f GiB of host memory (error %d), so that the trainer goes"
            " to sleep and wakes more slowly: see `ulimit -l` and the memory of the host",
            memory.nbytes / 2**30,
            code,
        )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
