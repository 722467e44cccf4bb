"""The environment's own reward."""

from agentrl.settings.base import Settings
from agentrl.trajectory import Score, Trajectory


class EnvironmentReward:
    """Sum of the environment's rewards over the episode, undiscounted, times `scale`."""

    pays_what_the_environment_pays = True

    class Config(Settings):
        """Settings of the environment's reward."""

        scale: float = 1.0
        """Factor on the sum."""

    def __init__(self, config: Config) -> None:
        self._scale = config.scale

    async def score(self, trajectory: Trajectory) -> Score:
        """The scaled return of the episode, and that of each turn."""
        value = self._scale * trajectory.env_return
        return Score(value, {"environment": value}, turns=self.score_turns(trajectory))

    def score_turns(self, trajectory: Trajectory) -> tuple[float, ...]:
        """The scaled reward of each turn."""
        rewards = trajectory.turn_rewards
        return tuple(rewards) if self._scale == 1 else tuple(self._scale * r for r in rewards)
