"""The settings of the rollouts."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl.conversation.context import FULL, Context
from agentrl.errors import ConfigError, PluginError
from agentrl.flow.retries import Retries
from agentrl.hosting.config import EnvDeadlines
from agentrl.rollout.branches import BranchesConfig
from agentrl.rollout.budget import Budget
from agentrl.rollout.rule_registry import load_rule
from agentrl.rollout.staleness import StalenessRule
from agentrl.scoring.config import RulePoolConfig
from agentrl.settings.base import Settings
from agentrl.settings.sampling import SamplingParams

SECONDS_PER_SAMPLED_TOKEN = 0.2
"""Slower engines count as hanging: those of full batches sample ten times as fast."""
CONTEXT_STEP = 8192
"""Tokens by which a prompt is counted: one that is shorter costs no time."""


def context_seconds(tokens: int, seconds_per_token: float) -> float:
    """Seconds for the prompt of an answer, counted in whole `CONTEXT_STEP`s of tokens, so that
    there are few different deadlines.
    """
    return tokens // CONTEXT_STEP * CONTEXT_STEP * seconds_per_token


class Deadlines(EnvDeadlines):
    """Seconds of loop time that each phase may take before it counts as failed."""

    generate: float = Field(120.0, gt=0)
    """One completion, including its wait for a place in the batch. By default 120, and 0.2 for each
    token that it may have (`rollout.sampling.max_tokens`). It stands still while the engine can
    answer nothing: while it sleeps, takes new weights, or is restarted."""
    seconds_per_context_token: float = Field(0.005, ge=0)
    """What each token of the prompt adds to `generate`, in seconds, counted in whole 8192s: after
    an update, an engine computes all contexts again before it goes on, which takes minutes if they
    are long. 0 if `generate` is set and this is not."""
    score: float = Field(600.0, gt=0)
    """A teacher's logprobs of one sample, including its wait for others (`recipe: distill`)."""
    train: float | None = Field(None, gt=0)
    """One call of the trainer: a step, its weights, a checkpoint. A missed deadline ends the run.
    By default 3600, and 0.01 for each token of the batch."""
    reward: float = Field(60.0, gt=0)
    """One part of the reward scoring one trajectory, or one group."""
    episode: float = Field(900.0, gt=0)
    """A whole episode, which has failed then; `rollout.budget.seconds` is when it is over. By
    default 900, and 0.2 for each token that it may sample (`rollout.budget`), and at least the
    budget's seconds and the longest turn. Both stand still while the episode waits for an engine
    that can answer nothing."""
    group: float = Field(7200.0, gt=0)
    """A whole group, including the episodes that are played again. By default 7200, and at least
    two episodes. It stands still while the policy's engine can answer nothing.
    """
    outage: float = Field(600.0, ge=0)
    """How long episodes wait for a server of environments, or for the engine of their sandboxes,
    that cannot be reached. Until then these failures count in no retry budget, and the deadline of
    a group stands still."""
    stall: float = Field(1200.0, gt=0)
    """How long the run may make no progress at all before it is ended; must exceed every phase of
    an episode. By default 1200, and at least twice the longest phase. Time in which the engine can
    answer nothing does not count, and it is never shorter than an answer to a full context."""

    def for_answers(self, tokens: int, budget: Budget) -> "Deadlines":
        """The same, with more time for answers of so many `tokens` in an episode, where the
        settings say nothing.

        Raises:
            ValueError: a deadline that the settings give is too short for the others, or for the
            budget.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if "generate" in given:
            given.setdefault("seconds_per_context_token", 0.0)
        more = {
            "generate": self.generate + SECONDS_PER_SAMPLED_TOKEN * tokens,
            "episode": self.episode + SECONDS_PER_SAMPLED_TOKEN * budget.most_tokens(tokens),
        } | given
        longest = max(self.reset, self.step, self.tool, more["generate"], self.reward)
        seconds = budget.seconds or 0.0
        if "episode" not in given:
            more["episode"] = max(
                more["episode"], seconds + more["generate"] + max(self.step, self.tool)
            )
        elif more["episode"] <= seconds:
            raise ValueError(
                f"an episode has failed after {more['episode']:g} s, and rollout.budget.seconds"
                f" ends it after {seconds:g}: raise rollout.deadlines.episode, or leave it out"
            )
        more = {
            "group": max(self.group, 2 * more["episode"]),
            "stall": max(self.stall, 2 * longest),
        } | more
        return Deadlines.model_validate({**self.model_dump(), **more})

    def stall_at(self, max_context: int) -> float:
        """`stall` with an engine of this context: at least twice an answer to the longest prompt,
        if that has more time than one to a short prompt.
        """
        more = context_seconds(max_context, self.seconds_per_context_token)
        return max(self.stall, 2 * (self.generate + more)) if more else self.stall

    @model_validator(mode="after")
    def _a_stall_is_longer_than_a_phase(self) -> Self:
        longest = max(self.reset, self.step, self.tool, self.generate, self.reward)
        if self.stall <= longest:
            raise ValueError(
                f"stall must be longer than every phase of an episode; the longest is {longest:g} s"
            )
        return self


_MIN_LIVE_EPISODES = 128
"""Live episodes of a run with few or unknown engines."""
_MAX_PER_LEAST = 8
"""How many times as many episodes may be live as the engines serve at once: where seven eighths of
an episode are the environment's."""


class LiveEpisodes(NamedTuple):
    """The bounds of the number of episodes that run at once."""

    least: int
    """Where the limit starts, and its lower bound."""
    most: int
    """Its upper bound."""


class WorkerRange(Settings):
    """A number of rollout workers that follows how busy they are."""

    min: int = Field(1, ge=1)
    """The fewest workers, with which the run begins."""
    max: int = Field(ge=1)
    """The most workers. On one machine more than it has cores are of no use."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(
                f"min is {self.min} and max is {self.max}: write the smaller one first"
            )
        return self

    def __str__(self) -> str:
        return f"{self.min}" if self.min == self.max else f"{self.min} to {self.max}"


class RolloutConfig(Settings):
    """How episodes are played and grouped."""

    groups_per_step: int = Field(16, gt=0)
    """Groups (tasks) in one training batch."""
    group_size: int = Field(8, gt=0)
    """Episodes of one task in its group."""
    extra_members: int = Field(0, ge=0)
    """Episodes played beyond `group_size`: the first to finish make the group, the rest are
    cancelled. Hides slow and failing environments, and favours short episodes: watch the metric
    `bias/seconds`."""
    branches: BranchesConfig | None = None
    """Episodes that leave another one of their group at a turn and go on from there, for
    `algorithm.advantage=branch` or `tree` (docs/branches.md). `{}` is one branch of each member, at
    a turn that is drawn. By default there are none."""
    budget: Budget = Budget()
    context: Context = FULL
    """The part of its conversation that the model sees: `full`, `last_k`, `scratchpad` or `summary`
    (`agentrl/conversation/context.py`)."""
    max_staleness: int = Field(0, ge=0)
    """How many versions older than the trained ones a token may be; 0 is synchronous training."""
    staleness_rule: str = "deadline_first"
    """Which groups are trained on next: `deadline_first`, `segment` (with a critic), `mask`,
    `drop`, or a rule of another package (entry-point group `agentrl.staleness_rules`, or
    `package.module:Name`). `agentrl/rollout/staleness.py` lists the guarantees and costs of each.
    `wait`, `gate` and `drain` are for simulations alone (`agentrl simulate CONFIG`)."""
    max_live_episodes: int | None = Field(None, gt=0)
    """Most episodes running at once; below this, the limit follows the engines' load and what
    their KV caches hold (docs/scaling.md). By default eight times
    `min_live_episodes`."""
    min_live_episodes: int | None = Field(None, gt=0)
    """Where that limit starts, and its lower bound. By default as many as all engines that are
    alive serve at once (engines x `engine.max_batch`), and at least 128; or fewer, if their KV
    caches do not hold the contexts of so many."""
    workers: Annotated[int, Field(ge=0)] | WorkerRange = 0
    """Processes that play the episodes, with `cluster=ray` on its machines in turn. Each has
    environments, a renderer and a tokenizer of its own; engines, rewards and the ledger stay with
    the controller. With 0, the controller plays the episodes, on one core. With `{min: 2, max: 16}`
    the number follows how busy they are. Whatever it is, the same episodes are played
    (docs/scaling.md)."""
    retries: Retries = Retries()
    max_failed_tasks: int = Field(16, ge=0)
    """Tasks that may fail permanently before the run ends."""
    filter_zero_variance: bool = False
    """Dynamic sampling (DAPO, arXiv 2503.14476): a group that teaches nothing, because all its
    advantages are 0, is replaced by the next task. With algorithms that compare whole rewards, that
    is one whose members all earned the same; with `reinforce`, one whose members earned nothing at
    all. Not for algorithms of which a group alone does not tell (critics, statistics of the batch
    or of earlier ones, a teacher, `kl_reward`)."""
    max_filtered_per_step: int = Field(256, ge=0)
    """Groups that may be filtered for one batch before the run ends with an error."""
    sampling: SamplingParams = SamplingParams()
    deadlines: Deadlines = Field(Deadlines(), validate_default=True)
    rules: RulePoolConfig = RulePoolConfig()

    @property
    def worker_range(self) -> WorkerRange | None:
        """The bounds of the number of rollout workers; `None` if the controller plays."""
        if isinstance(self.workers, WorkerRange):
            return self.workers
        return WorkerRange(min=self.workers, max=self.workers) if self.workers else None

    @property
    def rule(self) -> type[StalenessRule]:
        """The class of the staleness rule."""
        return load_rule(self.staleness_rule)

    def live_episodes(self, places: int = 0) -> LiveEpisodes:
        """The bounds of live episodes, of a run whose engines serve `places` requests at once; 0 if
        that is not known.
        """
        least = self.min_live_episodes or max(_MIN_LIVE_EPISODES, places)
        most = self.max_live_episodes or _MAX_PER_LEAST * least
        return LiveEpisodes(min(least, most), most)

    def with_places(self, places: int) -> "RolloutConfig":
        """The same, with the bounds of live episodes as settings, for such engines."""
        bounds = self.live_episodes(places)
        return self.model_copy(
            update={"min_live_episodes": bounds.least, "max_live_episodes": bounds.most}
        )

    def check_rule_trains(self) -> None:
        """Refuse a staleness rule that is for simulations alone.

        Raises:
            ConfigError: it is; names the rule to train with.
        """
        if self.rule.train_with:
            raise ConfigError(
                f"rollout.staleness_rule={self.staleness_rule} is the rule of another system, for"
                f" `agentrl simulate` alone: train with {self.rule.train_with}"
            )

    def oldest_trained(self, step: int) -> int:
        """Tokens sampled under an older version than this carry no loss at `step` (rules `mask` and
        `segment`).
        """
        return max(0, step - self.max_staleness) if self.rule.masks else 0

    @model_validator(mode="after")
    def _a_group_of_one_does_not_vary(self) -> Self:
        if self.filter_zero_variance and self.group_size == 1:
            raise ValueError(
                "filter_zero_variance filters every group of one member: set group_size to 2 or"
                " more, or leave filter_zero_variance out"
            )
        return self

    @field_validator("staleness_rule")
    @classmethod
    def _the_rule_exists(cls, name: str) -> str:
        try:
            load_rule(name)
        except PluginError as error:
            raise ValueError(str(error)) from error
        return name

    @field_validator("deadlines")
    @classmethod
    def _long_answers_take_longer(cls, deadlines: Deadlines, made: ValidationInfo) -> Deadlines:
        # They are wrong, which is an error already.
        if not {"sampling", "budget"} <= made.data.keys():
            return deadlines
        return deadlines.for_answers(made.data["sampling"].max_tokens, made.data["budget"])

    @field_validator("sampling")
    @classmethod
    def _training_samples_are_not_greedy(cls, sampling: SamplingParams) -> SamplingParams:
        if sampling.temperature == 0:
            raise ValueError("temperature must be above 0: greedy choices have no gradient")
        if sampling.top_k == 1 or sampling.min_p == 1:
            alone = "top_k=1" if sampling.top_k == 1 else "min_p=1"
            raise ValueError(
                f"{alone} leaves the likeliest token alone, whose probability is then 1: nothing is"
                " learned. Write it in the section evaluation, or leave more tokens"
            )
        return sampling


class OpponentsConfig(Settings):
    """Which opponents the policy meets in self-play."""

    latest: float = Field(0.5, ge=0, le=1)
    """Share of the tasks that the policy plays against itself as it is now, learning from all
    seats. With 1 there are no other opponents (SPIRAL, arXiv:2506.24119)."""
    every: int = Field(10, ge=1)
    """Steps between snapshots of the policy. The first snapshot is the model that the run began
    with.
    """
    pool: int = Field(10, ge=1)
    """How many of the latest snapshots opponents are drawn from. Each is a copy of the weights in
    the run's folder.
    """
    draw: Literal["uniform", "prioritised"] = "uniform"
    """How often each snapshot is drawn: equally, or the more often the less the policy wins against
    it (prioritised fictitious self-play, weight (1 - success)^2)."""
    engines: int = Field(1, ge=1)
    """Engines for opponents: so many snapshots are met at a time. Each needs as much memory as the
    policy's own.
    """
    seats: tuple[str, ...] = ()
    """The agents that the policy plays against snapshots, equally often each; by default all."""

    @property
    def num_engines(self) -> int:
        """How many engines the opponents need."""
        return 0 if self.latest == 1 else min(self.engines, self.pool)
