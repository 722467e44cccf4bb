"""Recipes: the training loops, of which the settings say what a run must know of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.protocols.offers import Offers

if TYPE_CHECKING:
    from agentrl.protocols.algorithm import Algorithm


@dataclass(frozen=True, slots=True)
class RecipeOffers(Offers):
    """The facts of a recipe that a config must know: the attribute `offers` of its settings. The
    last three are methods or settings of the same name. `Any` stands for `RunConfig`.
    """

    own_algorithm: bool = False
    """The recipe has an algorithm of its own, and does not use the section `algorithm`."""
    learns_by: "Algorithm | None" = None
    """Its own algorithm, if that learns from what the model plays."""
    unused: tuple[str, ...] = ()
    """More sections of the config that the recipe, as configured, does not use."""
    uses_reference: bool = False
    """The run has a second model, the reference."""
    teacher: object = None
    """The settings of a teacher that an engine of its own serves."""
    critic_updates: int = 1
    """Updates of the critic in a step."""
    check_run: Callable[[Any], None] | None = None
    """Raises `ValueError` for a run that cannot have this recipe."""
    most_updates: Callable[[Any], int] | None = None
    """Most updates of the trainer in a whole run; by default one for each step."""
