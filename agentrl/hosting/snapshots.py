"""Going back to a state of an environment: by its own `snapshot` and `restore`, or by playing its
actions again.

The second is for environments that declare themselves `deterministic`. It takes as long as the
episode so far, and is checked: what does not come back to the same replies is an `EnvError`.
"""

import inspect
import json
from collections.abc import Awaitable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

from agentrl.errors import EnvError
from agentrl.hosting.observations import IMAGES
from agentrl.hosting.wrappers import Wrapper
from agentrl.protocols.env import (
    Env,
    ResetResult,
    StepResult,
    can_restore,
    is_deterministic,
)

_Result = TypeVar("_Result", ResetResult, StepResult)


class ReplaysActions(Wrapper):
    """A deterministic environment whose state is what has led to it: the seed, the options and the
    actions.
    """

    restorable = True

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._begun: tuple[int, Mapping[str, Any]] | None = None
        self._actions: list[str] = []
        self._replies = blake2b(digest_size=16)

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> ResetResult | Awaitable[ResetResult]:
        """Begin an episode, and its record."""
        self._begun, self._actions = (seed, options), []
        self._replies = blake2b(digest_size=16)
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Step, and keep the action."""
        self._actions.append(action)
        return super().step(action)

    def began(self, result: ResetResult) -> ResetResult:
        """The same result, which is kept as a hash."""
        return self._hash_reply(result)

    def stepped(self, result: StepResult) -> StepResult:
        """The same result, which is kept as a hash."""
        return self._hash_reply(result)

    def _hash_reply(self, result: _Result) -> _Result:
        info = result[-1]
        seen = info.get(IMAGES) if isinstance(info, Mapping) else None
        self._replies.update(repr((result[:-1], seen)).encode(errors="replace"))
        return result

    def snapshot(self) -> bytes:
        """What has led to the present state, as JSON.

        Raises:
            EnvError: no episode has begun, or its options are no JSON.
        """
        if self._begun is None:
            raise EnvError("no episode is being played; call reset first")
        seed, options = self._begun
        state = {
            "seed": seed,
            "options": options,
            "actions": self._actions,
            "replies": self._replies.hexdigest(),
        }
        try:
            return json.dumps(state).encode()
        except (TypeError, ValueError) as error:
            raise EnvError(
                "a state that is reached by playing the actions again needs options that JSON has:"
                f" {error}"
            ) from error

    def restore(self, state: bytes) -> None | Awaitable[None]:
        """Play the actions that have led to a state.

        Raises:
            EnvError: the replies differ from the recorded ones.
        """
        replaying = self._replay(json.loads(state))
        methods = (layer for env in _layers(self.env) for layer in (env.reset, env.step))
        if any(map(inspect.iscoroutinefunction, methods)):
            return replaying
        # All methods are sync, so the coroutine never waits, and one `send` runs it to its end.
        try:
            replaying.send(None)
        except StopIteration:
            return None
        replaying.close()
        raise EnvError("reset or step is declared with `def` and waited for something")

    async def _replay(self, then: Mapping[str, Any]) -> None:
        begun = self.reset(seed=then["seed"], options=then["options"])
        if inspect.isawaitable(begun):
            await begun
        for action in then["actions"]:
            stepped = self.step(action)
            if inspect.isawaitable(stepped):
                await stepped
        if self._replies.hexdigest() != then["replies"]:
            raise EnvError(
                f"{type(self.unwrapped).__name__} declares itself deterministic, and its"
                f" {len(then['actions'])} actions, played again, gave other replies: take"
                " `deterministic` away, or what differs between two plays"
            )


def rewindable(env: Env) -> Env:
    """The environment, or one around it that can go back to its states, if there is a way."""
    return ReplaysActions(env) if is_deterministic(env) and not can_restore(env) else env


def _layers(env: Env) -> list[Env]:
    return [env, *_layers(env.env)] if isinstance(env, Wrapper) else [env]
