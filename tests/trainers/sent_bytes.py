"""A count of the bytes that a rank sends, by the collective and the ranks that take part."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_SHARES: Mapping[str, tuple[int, float]] = {
    "_allgather_base_": (0, 1),
    "_reduce_scatter_base_": (1, 1),
    "allreduce_": (0, 2),
    "alltoall_base_": (1, 1),
}
"""Of each collective, the argument with the whole tensor, and how many times (n - 1) / n of it a
rank of n sends: by a ring, or directly where each rank has another part for each other one."""


class SentBytes(TorchDispatchMode):
    """Counts, while it is open, what collectives send, by their names and their ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "c10d" and name in _SHARES:
            number, times = _SHARES[name]
            given = [one for one in tree_iter(args[number]) if isinstance(one, Tensor)]
            whole, group = sum(one.nbytes for one in given), _group(args)
            ranks = tuple(dist.get_process_group_ranks(group))
            sent = times * (len(ranks) - 1) * whole / len(ranks)
            if name == "alltoall_base_" and args[4]:  # so many rows to each rank
                sent = whole * (1 - args[4][dist.get_rank(group)] / max(1, sum(args[4])))
            self.sent[name.strip("_"), ranks] += round(sent)
        return func(*args, **(kwargs or {}))


def _group(args: Any) -> dist.ProcessGroup:
    for one in args:
        if "ProcessGroup" in str(getattr(one, "_type", lambda: "")()):
            return dist.ProcessGroup.unbox(one)
    raise AssertionError("a collective has a group")
