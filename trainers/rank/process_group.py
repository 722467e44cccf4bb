"""The process group of a trainer's ranks in torch.distributed."""

import socket
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import get_process_group_ranks

from agentrl.net.interfaces import LOOPBACK, meet_other_machines, own_address, stay_on_loopback
from agentrl.trainers.rank.tensor_files import Part
from agentrl.trainers.spec import RankInfo

_CPU = torch.device("cpu")
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for a missing rank. The death of a rank is noticed at once, by its
worker.
"""


def join(rank_info: RankInfo) -> torch.device:
    """Join the other ranks; returns the device of this one: its GPU, or the CPU (with gloo)."""
    host, _, port = rank_info.address.rpartition(":")
    if host == LOOPBACK:
        stay_on_loopback()
    else:
        meet_other_machines()
    meeting = rank_info.meeting
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        rank_info.mesh.world_size,
        is_master=meeting is not None,
        timeout=_COLLECTIVE_TIMEOUT,
        # A store that makes its socket itself listens on all interfaces.
        master_listen_fd=None if meeting is None else meeting.detach(),
    )
    cuda = torch.cuda.is_available()
    device = _own_gpu(store, f"{socket.gethostname()} {own_address()}") if cuda else _CPU
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.mesh.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    return device


def _own_gpu(store: Any, machine: str) -> torch.device:
    """A GPU of this process's machine that no other rank takes, as far as it has so many."""
    # A rank that is placed sees a single one. Others of the machine see the same ones, and ranks
    # are numbered over all machines.
    place = store.add(f"ranks on {machine}", 1) - 1
    torch.cuda.set_device(place % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def sum_of_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks, the same on each."""
    total = values.detach().clone()
    dist.all_reduce(total, dist.ReduceOp.SUM)
    return total


def max_of_ranks(value: Tensor) -> Tensor:
    """The largest value of all ranks, the same on each. NaN stays NaN."""
    # A reduction by MAX may lose a NaN.
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value.detach().contiguous())
    return torch.stack(gathered).max()


def broadcast(tensor: Tensor) -> Tensor:
    """A tensor in CPU memory, as rank 0 has it."""
    dist.broadcast(tensor, 0)
    return tensor


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the rows of a tensor of this shape are divided over so many ranks, as FSDP does it:
    equally many on each, as far as there are enough.

    With several `stacks`, as experts are divided, each of these equal parts of the rows is divided
    alone, and neighbouring ranks have rows of different ones. With several `columns`, the same of
    equal parts of the columns; and with `copies`, neighbouring ranks have the same rows. Only one
    of the three is not 1.

    Example: 8 rows over 4 ranks in 2 stacks. Rows 0 to 3 are the first stack: the ranks 0 and 2
    have 2 of them each, and the ranks 1 and 3 those of the second stack, rows 4 to 7.
    """

    shape: torch.Size
    ranks: int
    stacks: int = 1
    columns: int = 1
    copies: int = 1

    @property
    def neighbours(self) -> int:
        """Ranks that have rows of different parts, or copies of the same."""
        return self.stacks * self.columns * self.copies

    @property
    def most(self) -> int:
        """Rows of a rank that has as many as any."""
        return -(-self._stack_rows // (self.ranks // self.neighbours))

    def part(self, rank: int, values: Tensor, copy: int = 0, copies: int = 1) -> Part:
        """A rank's part of the tensor; `values` are its elements. So many `copies` of all ranks
        have it, of which this is number `copy`.
        """
        place, number = divmod(rank, self.neighbours)
        row, width = self.shape[1:].numel(), self.shape[1:].numel() // self.columns
        first = min(place * self.most, self._stack_rows)
        if self.stacks > 1:
            first += number * self._stack_rows
        if self.columns > 1:
            start = first * row + number * width
            return Part(self.shape, start, values, copy, copies, run=width, stride=row)
        copy, copies = copy * self.copies + number % self.copies, copies * self.copies
        return Part(self.shape, first * row, values, copy, copies)

    @property
    def order(self) -> list[int]:
        """Of each rank, the place of its rows before `joined`: those of a stack come together."""
        apart = self.ranks // self.stacks
        return [rank // self.stacks + rank % self.stacks * apart for rank in range(self.ranks)]

    def joined(self, parts: Tensor) -> Tensor:
        """The tensor, from the rows of each rank, filled up to `most` and in `order`: (ranks, most,
        ...).
        """
        if self.columns > 1:
            by_rows = parts.view(-1, self.columns, *parts.shape[1:]).movedim(1, 2)
            found = by_rows.flatten(2, 3).flatten(0, 1)[: self.shape[0]]
        else:
            by_stack = parts[:: self.copies].view(self.stacks, -1, *parts.shape[1:])
            found = by_stack.flatten(1, 2)[:, : self._stack_rows].flatten(0, 1)
        return found

    @property
    def _stack_rows(self) -> int:
        return self.shape[0] // self.stacks


def gather_rows(
    local: Tensor, layout: RowLayout, to: Collection[int], group: dist.ProcessGroup
) -> Tensor | None:
    """A tensor on the ranks `to`, whose rows are divided over the ranks of a group. None on the
    others. Ranks of other groups are not asked.
    """
    inside = [rank for rank in to if rank in get_process_group_ranks(group)]
    if not inside:
        return None
    rows = layout.most
    if len(local) == rows:
        own = local.contiguous()
    else:  # collectives need parts of one size
        own = local.new_zeros((rows, *local.shape[1:]))
        own[: len(local)] = local
    is_wanted = dist.get_rank() in inside
    if len(inside) == 1 and not is_wanted:
        dist.gather(own, dst=inside[0], group=group)
        return None
    parts = own.new_empty((layout.ranks, *own.shape))
    if len(inside) == 1:
        in_order = [parts[place] for place in layout.order]
        dist.gather(own, in_order, dst=dist.get_rank(), group=group)
    elif layout.stacks == 1:
        dist.all_gather_into_tensor(parts.flatten(0, 1), own, group=group)
    else:
        dist.all_gather([parts[place] for place in layout.order], own, group=group)
    return layout.joined(parts) if is_wanted else None
