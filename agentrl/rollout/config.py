"""The settings of the rollouts."""

from typing import Literal

from pydantic import Field

from agentrl.errors import Layer
from agentrl.flow import StalenessRuleName
from agentrl.protocols import Settings
from agentrl.rollout.context import FULL, Context
from agentrl.rollout.env_host import Deadlines
from agentrl.rollout.episode import Sampling
from agentrl.rollout.rule_pool import RulePoolConfig


class Retries(Settings):
    """How often one member of a group may fail, by whose fault it was, before the member is lost."""

    environment: int = Field(2, ge=0)
    """Play the episode again, with the same environment seed and new sampling."""
    engine: int = Field(4, ge=0)
    """The same, after a pause that doubles."""
    reward: int = Field(4, ge=0)
    """Ask the part of the reward that failed again about the same trajectory (or group), after a pause that doubles."""
    data: int = Field(0, ge=0)
    """Play again what cannot be played as it is (a first prompt that is too long)."""

    def of(self, layer: Layer) -> int:
        """The budget of a layer."""
        budget: int = getattr(self, layer)
        return budget

    @staticmethod
    def pause(failures: int) -> float:
        """Seconds to wait after the n-th failure in a row: half a second, doubled up to half a minute."""
        return min(0.5 * 2.0 ** (failures - 1), 30.0)


class RolloutConfig(Settings):
    """How episodes are played and grouped."""

    groups_per_step: int = Field(16, gt=0)
    """Groups (tasks) in one training batch."""
    group_size: int = Field(8, gt=0)
    """Episodes of one task in its group."""
    extra_members: int = Field(0, ge=0)
    """Episodes played beyond `group_size`: the first to finish make the group, the rest are cancelled. Hides slow and
    failing environments, and favours short episodes: watch the metric `bias/seconds`."""
    max_turns: int = Field(16, gt=0)
    """Turns after which an episode is truncated, of all its agents together."""
    context: Context = FULL
    """What of its conversation the model is shown: `full`, `last_k`, `scratchpad` or `summary`
    (`agentrl/rollout/context.py`)."""
    max_staleness: int = Field(0, ge=0)
    """How many versions older than the trained ones a token may be; 0 is synchronous training."""
    staleness_rule: StalenessRuleName = "deadline_first"
    """Which groups are trained on next; `agentrl/flow/staleness.py` says what each rule keeps and what it breaks."""
    weight_update: Literal["keep", "abort_resume", "drain"] = "keep"
    """What happens to turns in flight when new weights come: they go on under the new ones (`keep`), they are ended and
    sent again with the tokens they have (`abort_resume`), or they are waited for (`drain`)."""
    max_live_episodes: int = Field(1024, gt=0)
    """Most episodes in play at once; below it, the number follows the engine (`agentrl/rollout/live_limit.py`)."""
    min_live_episodes: int = Field(128, gt=0)
    """Where that number starts, and what it never falls below."""
    retries: Retries = Retries()
    max_failed_tasks: int = Field(16, ge=0)
    """Tasks that may fail for good before the run ends."""
    filter_zero_variance: bool = False
    """Dynamic sampling (DAPO, arXiv 2503.14476): a group whose members all earned the same teaches nothing, and is
    replaced by the next task."""
    max_filtered_per_step: int = Field(256, ge=0)
    """Groups that may be filtered for one batch before the run ends and says so."""
    sampling: Sampling = Sampling()
    deadlines: Deadlines = Deadlines()
    rules: RulePoolConfig = RulePoolConfig()
