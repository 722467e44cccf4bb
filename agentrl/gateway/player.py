"""A scripted player that answers a program's calls: for demonstrations, and for reading a program's
texts.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from random import Random
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import RAISED_BY_CODE, EngineError, describe, is_cancellation
from agentrl.protocols import Engine, EngineStats, GenerateRequest
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False, slots=True)
class PlayerEngine(Engine):
    """An `Engine` whose model is a function: `player(prompt, rng)` reads the text of a prompt and
    returns an answer.

    The answers are the tokens that a model would have sampled to write them, each with logprob 0
    (certainty).
    """

    player: Callable[[str, Random], Any]
    renderer: TemplateRenderer
    policy_version: int = 0
    max_context: int = 1 << 30
    _generated: int = field(default=0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`.

        Raises:
            EngineError: the player raised.
        """
        await asyncio.sleep(0)
        try:
            text = self.player(self.renderer.decode(request.prompt_ids), Random(request.seed))
            text = str(await text if isawaitable(text) else text)
        except RAISED_BY_CODE as error:
            if is_cancellation(error):
                raise
            raise EngineError(f"the player raised {describe(error)}") from error
        token_ids = self.renderer.answer_ids(text)
        self._generated += len(token_ids)
        return Completion(
            token_ids, floats(np.zeros(len(token_ids))), ints(np.zeros(len(token_ids))), "stop"
        )

    async def interrupt(self) -> None:
        """See `Engine.interrupt`: a player answers at once."""

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """A player has no weights.

        Raises:
            EngineError: always.
        """
        raise EngineError("a scripted player takes no weights")

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return EngineStats(0, 0, self._generated, 0, 0)
