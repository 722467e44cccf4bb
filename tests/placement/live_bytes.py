"""A count of the bytes of all tensors that are alive while code runs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

LEAST_BYTES = 16_384
"""Smaller storages do not count, so that the count stays fast."""


class LiveBytes(TorchDispatchMode):
    """Counts, while it is open, the storages that operations take and return. What a collective or
    a kernel allocates for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """Most bytes that were alive at once."""
        self.sizes_at_peak: list[int] = []
        """The sizes of the storages that were, the largest first."""
        self._storages: dict[int, Any] = {}
        self._foreign: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_iter((args, kwargs, result)) if isinstance(leaf, Tensor)]
        # What a view shows and nothing has returned is memory that a collective works in.
        known = [self._note(leaf, foreign=func.is_view) for leaf in leaves]
        if any(known):
            self._count()
        return result

    def _note(self, tensor: Tensor, *, foreign: bool = False) -> bool:
        """Remember the storage of a tensor; true if it is new and counts."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage._cdata in self._storages or storage.device.type == "meta":
            return False
        self._storages[storage._cdata] = storage._weak_ref()
        if foreign:
            self._foreign.add(storage._cdata)
        return storage.nbytes() >= LEAST_BYTES and not foreign

    def _count(self) -> None:
        sizes = []
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference)
            if storage is None:
                del self._storages[key]
                self._foreign.discard(key)
                torch.UntypedStorage._free_weak_ref(reference)
            elif storage.nbytes() and key not in self._foreign:
                sizes.append(storage.nbytes())
        if sum(sizes) > self.peak:
            self.peak, self.sizes_at_peak = sum(sizes), sorted(sizes, reverse=True)
