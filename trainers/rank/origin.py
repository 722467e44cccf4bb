"""The folder that a model is made from: the model is made without memory, sharded, and then each
rank reads its part.

on_meta: make the model ─▶ (adapters) ─▶ shard, take memory for the shards ─▶ Origin.fill: read them
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from agentrl.errors import ConfigError
from agentrl.trainers.rank.checkpoint import quiet
from agentrl.trainers.rank.tensor_files import Part, Stored, TensorFiles, pieces

if TYPE_CHECKING:
    from agentrl.trainers.rank.sharding import Sharding

LoadWhole = Callable[[], tuple[Mapping[str, Tensor], Sequence[str]]]
"""Loads a whole model by transformers: its state, and the names of the tensors that its folder
lacks.
"""


@contextmanager
def on_meta() -> Iterator[None]:
    """Parameters that this thread makes in the block take no memory. Buffers are made as ever."""
    thread = threading.get_ident()

    def forget(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(forget)
    try:
        yield
    finally:
        hook.remove()


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by what `make` makes of it; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = make(parameter)
            setattr(owner, name, made[parameter])


def take_memory(module: nn.Module, device: torch.device) -> None:
    """Give a model that was made `on_meta` memory on a device, without values, and move its buffers
    there.
    """
    replace_parameters(
        module,
        lambda p: nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad),
    )
    module.to(device)


def state_by_name(model: Any) -> dict[str, Tensor]:
    """A model's parameters and persistent buffers themselves; tied ones only under their first
    name.
    """
    found: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        found.setdefault(id(tensor), name)
    return {name: state[name] for name in found.values()}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the first values of a model are.

    `stored`: the tensors of its folder, and which tensors of the model they are; `others`: more
    names that a tensor may have there. `made`: the values of tensors that are not in the folder.
    `load` is for folders that hold the model in another form, and `names` is what the names of its
    tensors are now.
    """

    folder: Path
    stored: Sequence[Stored]
    others: Mapping[str, Sequence[str]]
    made: Mapping[str, Callable[[], Tensor]]
    names: Mapping[str, str]
    load: LoadWhole

    def fill(self, sharding: "Sharding") -> None:
        """Let each rank read its part of all tensors.

        Raises:
            ConfigError: the folder lacks some of them.
        """
        held = sharding.local_parts({*(one.of for one in self.stored), *self.made})
        if (found := self._find_in_files()) is not None:
            files, stored = found
            for piece in pieces(stored, held):
                files.read(piece)
        else:
            self._load_and_send(sharding, held)
        for name, make in self.made.items():
            _fill_part(held[name], make())
        sharding.after_load()

    def _find_in_files(self) -> tuple[TensorFiles, list[Stored]] | None:
        """The tensors as they are in the folder's files; None if these have another form."""
        try:
            files = TensorFiles.open(self.folder)
        except OSError:
            return None
        shapes, found = files.shapes, []
        for one in self.stored:
            names = [
                name
                for name in (one.name, *self.others.get(one.name, ()))
                if shapes.get(name) == one.shape
            ]
            if not names:
                return None
            found.append(replace(one, name=names[0]))
        return files, found

    def _load_and_send(self, sharding: "Sharding", held: Mapping[str, Part]) -> None:
        """Rank 0 loads the whole model into its CPU memory, and sends one tensor after another."""
        whole: Mapping[str, Tensor] = {}
        if sharding.rank == 0:
            whole, missing = self.load()
            lacking = sorted(
                {self.names[name] for name in missing if name in self.names} - self.made.keys()
            )
            if lacking:
                raise ConfigError(
                    f"{self.folder} lacks weights of the model that its config.json describes:"
                    f" {lacking}"
                )
        for before, name in self.names.items():
            if name in held:
                empty = torch.empty(held[name].shape, dtype=torch.float32)
                tensor = whole[before].float() if sharding.rank == 0 else empty
                _fill_part(held[name], sharding.broadcast(tensor.contiguous()))


def _fill_part(part: Part, whole: Tensor) -> None:
    with torch.no_grad():
        for start, values in part.runs:
            values.copy_(whole.reshape(-1)[start : start + len(values)])


class _Uncopied(torch.Tensor):
    """A tensor on the meta device of which `contiguous` makes no copy, so that what becomes of it
    stays a view.
    """

    def contiguous(self, *args: Any, **kwargs: Any) -> "_Uncopied":
        return self


def stored_tensors(model: Any) -> list[Stored]:
    """The tensors of a model's files, by the names and in the shapes of its published form.

    transformers holds some of them as one, and has the reverse of that. It is applied to views of
    one address space, so that a view's offset says which elements it is. A model whose files are no
    ranges of its tensors has its own names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = state_by_name(model)
    same = [Stored(name, tensor.shape, name) for name, tensor in state.items()]
    sizes = [tensor.numel() for tensor in state.values()]
    starts, names = list(accumulate(sizes, initial=0))[:-1], list(state)
    space = torch.empty(sum(sizes), device="meta").as_subclass(_Uncopied)
    views = {
        name: space[start : start + tensor.numel()].view(tensor.shape)
        for start, (name, tensor) in zip(starts, state.items(), strict=True)
    }
    found = []
    for name, view in revert_weight_conversion(model, views).items():
        if not isinstance(view, _Uncopied) or not view.is_contiguous():
            return same
        offset = int(view.storage_offset())
        of = bisect_right(starts, offset) - 1
        found.append(Stored(name, view.shape, names[of], offset - starts[of]))
    whole = sum(one.shape.numel() for one in found) == sum(sizes)
    return found if whole else same


def load_by_transformers(
    kind: Any, folder: Path, options: Mapping[str, Any]
) -> tuple[Mapping[str, Tensor], list[str]]:
    """See `LoadWhole`."""
    with quiet(warnings=False):
        model, info = kind.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, **options
        )
    return state_by_name(model), list(info["missing_keys"])
