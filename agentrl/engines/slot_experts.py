"""The experts that were chosen for the tokens of each slot of a KV cache, kept as its KV is.

A request that finds its KV in a slot, or copies it from another one, finds the experts that
computed it there.
"""

import numpy as np
import numpy.typing as npt

from agentrl.tokens.expert_choices import UNKNOWN, ChosenExperts

_INITIAL_TOKENS = 256
"""Tokens for which a slot's array has room at first."""


class SlotExperts:
    """The experts by slot and token, once there are any."""

    def __init__(self) -> None:
        self._by_slot: dict[int, npt.NDArray[np.int16]] = {}

    def write(self, slot: int, start: int, chosen_TLK: ChosenExperts) -> None:
        """Note those of a slot's tokens from `start` on."""
        if not len(chosen_TLK):
            return
        stop, held = start + len(chosen_TLK), self._by_slot.get(slot)
        if held is None or len(held) < stop:
            grown = np.full(
                (max(_INITIAL_TOKENS, 2 * stop), *chosen_TLK.shape[1:]), UNKNOWN, np.int16
            )
            if held is not None:
                grown[: len(held)] = held
            held = self._by_slot[slot] = grown
        held[start:stop] = chosen_TLK

    def copy(self, source: int, slot: int, stop: int) -> None:
        """Note those of the first tokens of `source` for another slot."""
        if (held := self._by_slot.get(source)) is not None:
            self.write(slot, 0, held[:stop])
        else:
            self._by_slot.pop(slot, None)

    def read(self, slot: int, start: int, stop: int) -> ChosenExperts | None:
        """A copy of those of a slot's tokens; None if nothing is known of them."""
        held = self._by_slot.get(slot)
        if held is None:
            return None
        chosen_TLK = held[start:stop].copy()
        return chosen_TLK if (chosen_TLK != UNKNOWN).any() else None


__all__ = ["SlotExperts"]
