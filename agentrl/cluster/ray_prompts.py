"""Prompts sent to an engine in an actor: for a session that the actor knows, only the new tokens
are sent.

    here:   SentPrompts.cut(request) ─▶ its new tokens
    there:  HeldPrompts.whole(...)   ─▶ the request as it was

A prompt of 50,000 tokens is 200 kB, which Ray would put into its object store for every turn.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.tokens.arrays import GrowingInts
from agentrl.tokens.placed_images import PlacedImage, images_from, shifted

if TYPE_CHECKING:
    from agentrl.protocols import GenerateRequest
    from agentrl.trajectory import Completion

_SESSIONS = 1 << 16
"""Sessions remembered by the sender; the least recently used is forgotten first."""
_TOKENS = 1 << 24
"""What the actor holds of all sessions, in tokens of four bytes; the least recently used session is
forgotten first."""


class SentPrompts:
    """How many tokens of each session an actor should know."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, int] = OrderedDict()

    def cut(self, request: "GenerateRequest") -> "GenerateRequest | None":
        """The request without the prompt tokens that the actor should know; None if it should know
        none.
        """
        if not request.known or self._lengths.get(request.session) != request.known:
            return None
        return replace(
            request,
            prompt_ids=request.prompt_ids[request.known :],
            images=shifted(images_from(request.images, request.known), -request.known),
        )

    def answered(self, request: "GenerateRequest", completion: "Completion") -> None:
        """Note that the actor has answered this request, given here with its whole prompt."""
        if request.session:
            self._lengths[request.session] = len(request.prompt_ids) + len(completion.token_ids)
            self._lengths.move_to_end(request.session)
            if len(self._lengths) > _SESSIONS:
                self._lengths.popitem(last=False)


class _Held:
    """The last prompt and completion of a session, with the pictures in them."""

    __slots__ = ("images", "tokens")

    def __init__(self, tokens: GrowingInts, images: tuple[PlacedImage, ...]) -> None:
        self.tokens = tokens
        self.images = images

    @property
    def size(self) -> int:
        """In tokens, of four bytes each."""
        return len(self.tokens) + sum(len(placed.image.data) // 4 for placed in self.images)


class HeldPrompts:
    """The tokens and pictures of the last prompt and completion of each session, in the actor."""

    def __init__(self, limit: int = _TOKENS) -> None:
        self._limit = limit
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._size = 0

    def whole(self, cut: "GenerateRequest") -> "GenerateRequest | None":
        """The request before it was cut; None if the actor does not hold `known` tokens: it must
        then be sent whole.
        """
        held = self._held.get(cut.session)
        if held is None or len(held.tokens) != cut.known:
            return None
        # Taken out and put back: its size changes, and it is now the last to be forgotten.
        self._take(cut.session)
        held.tokens.append(cut.prompt_ids)
        held.images += shifted(cut.images, cut.known)
        self._put(cut.session, held)
        return replace(cut, prompt_ids=held.tokens.values, images=held.images)

    def answered(
        self, request: "GenerateRequest", completion: "Completion", *, was_cut: bool
    ) -> None:
        """Remember what the next request of the session begins with."""
        if not request.session:
            return
        held = self._take(request.session)
        if held is None or not was_cut or len(held.tokens) != len(request.prompt_ids):
            held = _Held(GrowingInts(request.prompt_ids), request.images)
        held.tokens.append(completion.token_ids)
        self._put(request.session, held)

    def _take(self, session: str) -> _Held | None:
        held = self._held.pop(session, None)
        self._size -= held.size if held else 0
        return held

    def _put(self, session: str, held: _Held) -> None:
        self._held[session] = held
        self._size += held.size
        while self._size > self._limit:
            self._take(next(iter(self._held)))
