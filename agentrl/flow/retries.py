"""`Retries`: how often failures are retried, by the layer that failed."""

from pydantic import Field

from agentrl.errors import Layer
from agentrl.settings.base import Settings


class Retries(Settings):
    """The number of failures, by layer, after which a member of a group is lost."""

    environment: int = Field(2, ge=0)
    """Play the episode again, with the same environment seed and new sampling, after a pause that
    doubles. Where an action caused the failure, this is biased: the action is never unlearned
    (docs/algorithms.md: 0.09 of the gradient with 2 % failures, 0.6 with 20 %)."""
    engine: int = Field(4, ge=0)
    """The same."""
    reward: int = Field(4, ge=0)
    """Ask the part of the reward that failed again about the same trajectory (or group), after a
    pause that doubles.
    """
    data: int = Field(0, ge=0)
    """Play an episode again that cannot be played as it is (its first prompt is too long)."""

    def of(self, layer: Layer) -> int:
        """The budget of a layer."""
        budget: int = getattr(self, layer)
        return budget

    @staticmethod
    def pause(failures: int) -> float:
        """Seconds to wait after the n-th failure in a row: half a second, doubled up to half a
        minute.
        """
        return 0.5 * 2.0 ** (failures - 1) if failures < 7 else 30.0
