"""Prompts on the way to an engine in an actor: of a session that it knows, only the tokens that are new are sent.

    here:  SentPrompts.cut(request) ─▶ its new tokens ─▶ there: HeldPrompts.whole(...) ─▶ the request as it was

A prompt of 50,000 tokens is 200 kB, which Ray would put into its object store for every turn.
"""

from collections import OrderedDict
from dataclasses import replace

from agentrl.arrays import GrowingInts
from agentrl.protocols import GenerateRequest
from agentrl.trajectory import Completion

_SESSIONS = 1 << 16
"""Sessions that are remembered here; the longest unused is forgotten first."""
_TOKENS = 1 << 24
"""Tokens that are held there, of all sessions; the longest unused is forgotten first."""


class SentPrompts:
    """What an actor should know of each session: how many tokens."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, int] = OrderedDict()

    def cut(self, request: GenerateRequest) -> GenerateRequest | None:
        """The request without what the actor should know of its prompt; None where that is nothing."""
        if not request.known or self._lengths.get(request.session) != request.known:
            return None
        return replace(request, prompt_ids=request.prompt_ids[request.known :])

    def answered(self, request: GenerateRequest, completion: Completion) -> None:
        """The actor has answered a request, which is whole here."""
        if request.session:
            self._lengths[request.session] = len(request.prompt_ids) + len(completion.token_ids)
            self._lengths.move_to_end(request.session)
            if len(self._lengths) > _SESSIONS:
                self._lengths.popitem(last=False)


class HeldPrompts:
    """The tokens of the last prompt and completion of each session, in the actor."""

    def __init__(self, limit: int = _TOKENS) -> None:
        self._limit = limit
        self._held: OrderedDict[str, GrowingInts] = OrderedDict()
        self._tokens = 0

    def whole(self, cut: GenerateRequest) -> GenerateRequest | None:
        """The request as it was before it was cut; None where its session is not as it says: it has to come whole."""
        held = self._held.get(cut.session)
        if held is None or len(held) != cut.known:
            return None
        held = self._take(cut.session)
        held.append(cut.prompt_ids)
        self._put(cut.session, held)
        return replace(cut, prompt_ids=held.values)

    def answered(self, request: GenerateRequest, completion: Completion, *, was_cut: bool) -> None:
        """Remember what the next request of the session begins with."""
        if not request.session:
            return
        held = self._take(request.session)
        if not was_cut or len(held) != len(request.prompt_ids):  # else it is the prompt already
            held = GrowingInts(request.prompt_ids)
        held.append(completion.token_ids)
        self._put(request.session, held)

    def _take(self, session: str) -> GrowingInts:
        held = self._held.pop(session, None) or GrowingInts()
        self._tokens -= len(held)
        return held

    def _put(self, session: str, held: GrowingInts) -> None:
        self._held[session] = held
        self._tokens += len(held)
        while self._tokens > self._limit:
            self._take(next(iter(self._held)))
