"""Experts' choices in Ray's object store, where the engine that made them has put them."""

from dataclasses import dataclass, replace
from typing import Any

from agentrl.tokens.expert_choices import ChosenExperts
from agentrl.trajectory import Completion


@dataclass(frozen=True, slots=True)
class RayChoices:
    """`HeldChoices` that an actor has put into the object store of its machine. They are dropped
    with the last reference, and lost with the actor.
    """

    reference: Any

    def __call__(self) -> ChosenExperts | None:
        """Ray copies them to this machine once, for all its processes."""
        import ray
        from ray.exceptions import ObjectLostError

        try:
            chosen_TLK: ChosenExperts = ray.get(self.reference)
        except ObjectLostError:
            return None
        return chosen_TLK


def with_held_choices(completion: Completion) -> Completion:
    """A completion whose choices lie in the object store of this machine."""
    import ray

    if completion.experts is None:
        return completion
    held = completion.experts.held(lambda chosen_TLK: RayChoices(ray.put(chosen_TLK)))
    return replace(completion, experts=held)


__all__ = ["RayChoices", "with_held_choices"]
