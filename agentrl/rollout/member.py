"""`Member`: plays and scores one episode.

A member has neither ledger nor slots: it takes an `Assignment`, and returns a `MemberResult`. Both
can be pickled, and so can its reports, so it works the same in any process.
"""

from dataclasses import dataclass, replace

from agentrl.flow import elapsed
from agentrl.rollout.assignment import (
    Assignment,
    EpisodeLength,
    EpisodeOver,
    Report,
    RewardRetried,
    ignore_reports,
)
from agentrl.rollout.runner import EpisodeRunner
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.trajectory import UNSCORED, Failed, Score, Trajectory


@dataclass(frozen=True, slots=True)
class MemberResult:
    """An episode that was played and scored, or the failure that keeps it from training."""

    trajectories: tuple[Trajectory, ...]
    """One for each trained agent, at least one; also of a failed episode, as far as it came."""
    scores: tuple[Score, ...] = ()
    """One for each trajectory; empty if the episode has failed."""
    failure: Failed | None = None
    """The failure, if it has failed."""

    @property
    def scored(self) -> tuple[tuple[Trajectory, Score], ...]:
        """The trajectories with their scores; none if the episode has failed."""
        return () if self.failure else tuple(zip(self.trajectories, self.scores, strict=True))


@dataclass(frozen=True, slots=True)
class Member:
    """Plays assignments, in sequence or concurrently."""

    runner: EpisodeRunner
    """Plays the episodes."""
    reward: RewardPipeline | None = None
    """Scores them; None leaves them unscored."""

    async def play(self, assignment: Assignment, report: Report = ignore_reports) -> MemberResult:
        """Play an episode to its end, and score it. Failures are in the result.

        Raises:
            ConfigError: the settings do not fit the environment or the reward.
        """
        lengths: tuple[EpisodeLength, ...] = ()
        try:
            played = tuple(await self.runner.play(assignment, report))
            lengths = tuple(
                EpisodeLength.of(whole) for whole in played if not isinstance(whole.status, Failed)
            )
        finally:
            # Before it is scored, so that a slow reward holds no slot; also if it was cancelled.
            report(EpisodeOver(lengths))
        return await self._score(played, report)

    async def _score(self, played: tuple[Trajectory, ...], report: Report) -> MemberResult:
        def note_retry(trajectory_id: str) -> None:
            report(RewardRetried(trajectory_id))

        scores = []
        for trajectory in played:
            if isinstance(trajectory.status, Failed):
                return MemberResult(played, failure=trajectory.status)
            if self.reward is None:
                scores.append(UNSCORED)
                continue
            began = elapsed()
            score = await self.reward.score(trajectory, note_retry)
            if isinstance(score.status, Failed):
                return MemberResult(played, failure=score.status)
            scores.append(replace(score, scoring_spans=((began, elapsed()),)))
        return MemberResult(played, tuple(scores))
