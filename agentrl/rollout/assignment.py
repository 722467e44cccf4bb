"""`Assignment`: one episode to play, and the reports of the member that plays it. Both are values
that can be sent to another process.

    controller ──Assignment──▶ member ──MemberReport, again and again──▶ controller
"""

from collections.abc import Callable
from dataclasses import dataclass

from agentrl.rollout.branches import BranchPlan, BranchStart
from agentrl.trajectory import Task, Trajectory


@dataclass(frozen=True, slots=True)
class Assignment:
    """One episode to play.

    `Assignment("train-000007/2/1", task, seed=812, member=2, attempt=1)` is the second attempt of
    the third member of the group of `train-000007`.
    """

    id: str
    """The episode's, in the ledger and in trajectories: TASK/member/attempt in training."""
    task: Task
    """The problem. Its seed is the environment's, the same for all members of a group."""
    seed: int
    """For sampling: different in each attempt of each member."""
    priority: int = 0
    """Of the episode's requests to the engine; those with a lower number are served first. In
    training it is the step that the group must be trained at."""
    member: int = 0
    """Number of the member in its group, from 0."""
    attempt: int = 0
    """Number of the member's attempt, from 0."""
    admitted_version: int = 0
    """The policy version that was live when the group was admitted."""
    reports_turns: bool = False
    """The member reports its turns while it plays (`TurnsPlayed`), to be trained on in parts."""
    plan: BranchPlan | None = None
    """Where it reports the states that branches leave from (`StateSaved`)."""
    start: BranchStart | None = None
    """Where it leaves another episode, if it does not play from the beginning."""


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """Models have answered, with so many tokens."""

    tokens: int
    answers: int = 1
    context: int = 0
    """Tokens of the conversations with the policy by now: what its engine holds for the episode."""

    def __add__(self, later: "TokensSampled") -> "TokensSampled":
        """This and a later one as one."""
        return TokensSampled(
            self.tokens + later.tokens, self.answers + later.answers, later.context
        )


@dataclass(frozen=True, slots=True)
class TurnsPlayed:
    """All turns so far whose outcome is known, as a trajectory of each trained agent.

    Empty when the episode is over: from then on its last turn may have failed, or may earn the
    verdict on the whole, so nothing more of it is trained on before its result is there.
    """

    segments: tuple[Trajectory, ...] = ()
    """Each has the status `SEGMENT`, and all turns from the first on."""


@dataclass(frozen=True, slots=True)
class StateSaved:
    """The state of the environment before the turn of this number, for branches."""

    turn: int
    state: bytes


@dataclass(frozen=True, slots=True)
class EpisodeLength:
    """The length of a trajectory that came to its end."""

    seconds: float
    tokens: int
    """Tokens that the model sampled."""

    @staticmethod
    def of(trajectory: Trajectory) -> "EpisodeLength":
        """The length of a trajectory."""
        return EpisodeLength(trajectory.seconds, trajectory.num_tokens)


@dataclass(frozen=True, slots=True)
class EpisodeOver:
    """The episode needs its slot no longer: it is being scored, has failed, or was cut off."""

    lengths: tuple[EpisodeLength, ...] = ()
    """Those of its trajectories that came to an end."""


@dataclass(frozen=True, slots=True)
class RewardRetried:
    """A part of the reward has failed on a trajectory, and is asked again."""

    trajectory_id: str


MemberReport = TokensSampled | TurnsPlayed | StateSaved | EpisodeOver | RewardRetried
Report = Callable[[MemberReport], None]
"""Takes what a member reports, in order. It returns at once, and raises nothing."""


def ignore_reports(report: MemberReport) -> None:
    """A `Report` for callers that only want the result."""
