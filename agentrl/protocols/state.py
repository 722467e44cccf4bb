"""State that a resumed run continues from."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """A part of a run with state of its own. The state is kept in each checkpoint as JSON.

    A part with the state of a checkpoint behaves exactly as the part that was saved there.
    """

    def state(self) -> Any:
        """The state as JSON has it: mappings with texts as keys, lists, numbers, texts."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from what `state` has returned in an earlier launch. Called at most once, before
        the part is used.
        """
        ...
