"""Combinations of settings, as a user writes them, and what the step that a run would take with
them has to be.

A combination is a value of each factor below. Its config is read by `load_config`, or refused. What
a run would make of it (the algorithm, the processing of batches, what is filtered, masked and cut)
goes into an `ExactStep`.

The true gradient is found here in another way: from single paths of the problem, without groups,
baselines or batches. Settings that are biased by design (`BIASED`) are replaced by their nearest
unbiased value before the two are compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.policy_loss import PolicyAlgorithm
from agentrl.algorithms.rae import RoleAdvantage
from agentrl.config import load_config
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.oracles.exact_steps import ExactShare, ExactStep, StepRules
from agentrl.oracles.problems import PROBLEMS
from agentrl.protocols import ActorCritic

Row = Mapping[str, str]
"""The label of a value for each factor, or for some; the others have their first value."""

_STOPPING = "name: oracle, options: {problem: stopping}"
_BANDIT = "name: oracle, label: other, options: {problem: bandit}"
_CORRIDOR = (
    "{name: oracle, options: {problem: corridor, settings: {length: 1, limit: 2, noise: 0.5}}}"
)

ALGORITHMS = (
    "grpo rloo gspo cispo sapo gigpo reinforce rae reinforce_pp rebn ppo turn_ppo archer dpo"
    " distill rejection"
)
FACTORS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "algorithm": {name: (f"algorithm.name={name}",) for name in ALGORITHMS.split()},
    "surrogate": {
        "default": (),
        **{name: (f"algorithm.surrogate={name}",) for name in ("ppo", "gspo", "cispo", "sapo")},
    },
    "env": {
        "stopping": (f"env={{{_STOPPING}}}",),
        "bandit": (f"env={{{_BANDIT.replace('label: other, ', '')}}}",),
        "corridor": (f"env={_CORRIDOR}",),
        "mixture": (f"env=[{{{_STOPPING}}}, {{{_BANDIT}}}]",),
        "own gamma": (f"env=[{{{_STOPPING}}}, {{{_BANDIT}, algorithm: {{gamma: 0.5}}}}]",),
        "own advantage": (
            f"env=[{{{_STOPPING}}}, {{{_BANDIT}, algorithm: {{advantage: leave_one_out}}}}]",
        ),
        "own kl": (f"env=[{{{_STOPPING}}}, {{{_BANDIT}, algorithm: {{kl: 0.3}}}}]",),
        "own group size": (f"env=[{{{_STOPPING}}}, {{{_BANDIT}, group_size: 3}}]",),
    },
    "advantage": {
        "default": (),
        **{
            name: (f"algorithm.advantage={name}",)
            for name in ("group_std", "group_mean", "leave_one_out")
        },
    },
    "deviation": {"default": (), "sample": ("algorithm.std=sample",)},
    "credit": {
        "default": (),
        "to go": ("algorithm.reward_to_go=true",),
        "whole": ("algorithm.reward_to_go=false",),
        "to go, turn": ("algorithm.reward_to_go=true", "algorithm.baseline=turn"),
    },
    "gamma": {"default": (), "1": ("algorithm.gamma=1",), "0.5": ("algorithm.gamma=0.5",)},
    "states": {"default": (), "0": ("algorithm.step_weight=0",)},
    "statistics": {"default": (), "tokens": ("algorithm.statistics=tokens",)},
    "group baseline": {"default": (), "true": ("algorithm.group_baseline=true",)},
    "lambda": {
        "default": (),
        "1": ("algorithm.lam=1",),
        "0.5": ("algorithm.lam=0.5",),
        "by length": ("algorithm.lam_length=0.5",),
    },
    "whiten": {"default": (), "false": ("algorithm.whiten=false",)},
    "end": {"default": (), "terminal": ("algorithm.truncated=terminal",)},
    "labels": {"default": (), "soft": ("algorithm.labels=soft",)},
    "reward weight": {"default": (), "0.5": ("algorithm.reward_weight=0.5",)},
    "keep": {
        "default": (),
        **{name: (f"algorithm.keep={name}",) for name in ("best", "above_mean")},
    },
    "normalizer": {
        "default": (),
        **{name: (f"algorithm.normalizer={name}",) for name in ("1.0", "tokens", "trajectories")},
    },
    "kl": {"default": (), "0.2": ("algorithm.kl=0.2",)},
    "kl_reward": {"default": (), "0.2": ("algorithm.kl_reward=0.2",)},
    "entropy": {"default": (), "0.1": ("algorithm.entropy_bonus=0.1",)},
    "clip": {
        "default": (),
        "dual": ("algorithm.dual_clip=3",),
        "narrow": ("algorithm.clip_high=0.01",),
    },
    "importance": {
        "default": (),
        "wide": ("algorithm.importance_cap=1000000",),
        "wide, sequence": (
            "algorithm.importance_cap=1000000",
            "algorithm.importance_level=sequence",
        ),
        "mask": ("algorithm.importance=mask",),
        "floor": ("algorithm.importance_floor=0.95",),
        "none": ("algorithm.importance_cap=null",),
    },
    "old logprobs": {"default": (), "engine": ("trainer.old_logprobs=engine",)},
    "normalize": {
        "default": (),
        **{name: (f"batch_processing.normalize={name}",) for name in ("batch", "environment")},
    },
    "length penalty": {"default": (), "0.3": ("batch_processing.length_penalty=0.3",)},
    "overlong": {"default": (), "mask": ("batch_processing.overlong=mask",)},
    "keep variance": {"default": (), "0.8": ("batch_processing.keep_variance=0.8",)},
    "filter": {"default": (), "zero variance": ("rollout.filter_zero_variance=true",)},
    "sampling": {
        "default": (),
        "warm": ("rollout.sampling.temperature=1.5",),
        "top_p": ("rollout.sampling.top_p=0.9",),
        "top_k": ("rollout.sampling.top_k=2",),
        "min_p": ("rollout.sampling.min_p=0.1", "rollout.sampling.temperature=0.8"),
    },
    "staleness": {
        "default": (),
        "1": ("rollout.max_staleness=1",),
        "mask": ("rollout.max_staleness=1", "rollout.staleness_rule=mask"),
        "segment": ("rollout.max_staleness=1", "rollout.staleness_rule=segment"),
    },
    "played by": {"an older policy": (), "the newest policy": ()},
    "members": {"2": (), "1": ("rollout.group_size=1",), "3": ("rollout.group_size=3",)},
    "groups": {"1": (), "2": ()},
}
"""What a combination is made of: the overrides of each value. The first value is the one of a row
that says nothing.
"""


def first(factor: str) -> str:
    """The value of a factor that a row leaves out."""
    return next(iter(FACTORS[factor]))


def value(row: Row, factor: str) -> str:
    """The value of a factor in a row."""
    return row.get(factor, first(factor))


def overrides(row: Row) -> list[str]:
    """What a user would write for a row."""
    envs = 1 if value(row, "env") in ("stopping", "bandit", "corridor") else 2
    chosen = [line for factor in FACTORS for line in FACTORS[factor][value(row, factor)]]
    return [f"rollout.groups_per_step={int(value(row, 'groups')) * envs}", *chosen]


def configured(row: Row, base: Path) -> RunConfig:
    """The config of a row.

    Raises:
        ConfigError: it is refused.
    """
    return load_config(base, overrides(row)).config


def write_base(folder: Path) -> Path:
    """The file that the overrides of rows change."""
    base = folder / "base.yaml"
    base.write_text("model: tiny\nrollout: {group_size: 2}\n")
    return base


def smallest_refused(row: Row, base: Path) -> tuple[Row, str]:
    """The smallest part of a refused row that is refused, and what its user is told."""

    def refusal(part: Row) -> str:
        try:
            configured(part, base)
        except ConfigError as error:
            return str(error)
        return ""

    part, why = (
        {factor: chosen for factor, chosen in row.items() if chosen != first(factor)},
        refusal(row),
    )
    part["algorithm"] = value(row, "algorithm")  # also the first one: another may accept the rest
    for factor in [factor for factor in part if factor != "algorithm"]:
        smaller = {other: chosen for other, chosen in part.items() if other != factor}
        if without := refusal(smaller):
            part, why = smaller, without
    return part, why


# What a run makes of a config


def step_of(config: RunConfig) -> ExactStep:
    """The step of a run with this config."""
    algorithm: PolicyAlgorithm = config.algorithm.make()
    envs = list(config.env.all.items())
    shares = [
        ExactShare(
            name,
            PROBLEMS[env.options["problem"]](**env.options.get("settings", {})),
            config.rollout.groups_per_step // len(envs),
            getattr(env, "group_size", None) or config.rollout.group_size,
        )
        for name, env in envs
    ]
    by_env = {
        one.run_name: one.algorithm.make()
        for one in config.env.mixture
        if one.algorithm is not None
    }
    processing = BatchProcessing(config.batch_processing, algorithm, by_env)
    for learner in (algorithm, *by_env.values()):
        if isinstance(learner, RoleAdvantage):  # what it has learned in earlier steps
            learner.restore({"baselines": {name: 0.3 for name, _ in envs}})
    gamma = getattr(algorithm.config, "gamma", 1.0) if isinstance(algorithm, ActorCritic) else 1.0
    return ExactStep(shares, algorithm, processing, rules_of(config, processing), by_env, gamma)


def rules_of(config: RunConfig, processing: BatchProcessing) -> StepRules:
    """What the scheduler and the trainer do with the groups of a step; stale ones are as old as
    they may be.
    """
    rollout = config.rollout
    masked = (
        rollout.max_staleness > 0 and rollout.rule.masks and not rollout.rule.trains_on_segments
    )
    return StepRules(
        trains=processing.teaches if rollout.filter_zero_variance else lambda group: True,
        oldest=rollout.oldest_trained(rollout.max_staleness + masked),
        versions=(0, 1) if masked else (0,),
        cut=1 if rollout.rule.trains_on_segments else None,
        engine_is_old=getattr(config.trainer.settings, "old_logprobs", "trainer") == "engine",
    )


# What is biased by design


@dataclass(frozen=True, slots=True)
class Bias:
    """Settings whose gradient is not the true one, by design. `when`: the values of a row that has
    it, one of each.

    `instead`: what a row has in their place where its gradient has to be the true one. `alone`: a
    row that has nothing else that is biased.
    """

    when: Mapping[str, str]
    instead: Row
    alone: Row

    def is_in(self, row: Row) -> bool:
        """Whether a row has it."""
        has = all(value(row, factor) in values.split("|") for factor, values in self.when.items())
        return has and any(value(row, factor) != chosen for factor, chosen in self.instead.items())


_WEIGHED = "|".join(name for name in ALGORITHMS.split() if name != "rejection")
_COMPARING = "|".join(name for name in _WEIGHED.split("|") if name not in ("reinforce", "rae"))
_GROUPS = "grpo|gspo|cispo|sapo|gigpo"
_CRITIC = {"whiten": "false", "normalizer": "1.0", "end": "terminal"}
_PLAIN = {"algorithm": "rloo", "normalizer": "1.0"}
_REINFORCE = {"algorithm": "reinforce", "group baseline": "default", "statistics": "default"}
_ONE_EPISODE = {"members": "1", "groups": "1"}
"""In a step. What is computed over a batch is then computed over an episode."""
_FRESH = {"played by": "the newest policy"}
_EXACT_WEIGHTS = {"importance": "wide, sequence", "old logprobs": "default"}

BIASES: Mapping[str, Bias] = {
    "`advantage=group_std`": Bias(
        {"advantage": "group_std"},
        {"advantage": "leave_one_out", "deviation": "default"},
        {"algorithm": "grpo", "normalizer": "1.0"},
    ),
    "`reinforce_pp`": Bias(
        {"algorithm": "reinforce_pp"},
        _REINFORCE,
        {"algorithm": "reinforce_pp", "normalizer": "1.0"},
    ),
    "`rebn`": Bias(
        {"algorithm": "rebn"}, _REINFORCE, {"algorithm": "rebn", "normalizer": "1.0", "gamma": "1"}
    ),
    "`rebn`, one episode": Bias(
        {"algorithm": "rebn", **_ONE_EPISODE},
        _REINFORCE,
        {"algorithm": "rebn", "normalizer": "1.0", "gamma": "1", "members": "1"},
    ),
    "`gigpo`": Bias(
        {"algorithm": "gigpo", "states": "default"},
        {"states": "0"},
        {"algorithm": "gigpo", "advantage": "leave_one_out", "normalizer": "1.0"},
    ),
    "`lam_length`": Bias(
        {"lambda": "by length"},
        {"lambda": "1"},
        {"algorithm": "ppo", "lambda": "by length", **_CRITIC},
    ),
    "`whiten`": Bias(
        {"algorithm": "ppo|turn_ppo", "whiten": "default"},
        {"whiten": "false"},
        {"algorithm": "ppo", **_CRITIC, "whiten": "default"},
    ),
    "`normalizer=tokens`": Bias(
        {"normalizer": "tokens"}, {"normalizer": "1.0"}, {"algorithm": "rloo"}
    ),
    "`normalizer=tokens`, one episode": Bias(
        {"normalizer": "tokens", **_ONE_EPISODE},
        {"normalizer": "1.0"},
        {"algorithm": "reinforce", "normalizer": "tokens", "members": "1"},
    ),
    "`normalizer=trajectories`": Bias(
        {"algorithm": _COMPARING, "normalizer": "trajectories"},
        {"normalizer": "1.0"},
        {"algorithm": "rloo", "normalizer": "trajectories"},
    ),
    "`normalizer=trajectories`, `reinforce`": Bias(
        {"algorithm": "reinforce|rae", "normalizer": "trajectories"},
        {"normalizer": "1.0"},
        {"algorithm": "reinforce", "normalizer": "trajectories"},
    ),
    "`normalize=batch`": Bias(
        {"normalize": "batch|environment"},
        {"normalize": "default"},
        {**_PLAIN, "normalize": "batch"},
    ),
    "`length_penalty`": Bias(
        {"algorithm": _WEIGHED, "length penalty": "0.3"},
        {"length penalty": "default"},
        {**_PLAIN, "length penalty": "0.3"},
    ),
    "`length_penalty`, `rejection`": Bias(
        {"algorithm": "rejection", "length penalty": "0.3"},
        {"length penalty": "default"},
        {"algorithm": "rejection", "keep": "best", "length penalty": "0.3"},
    ),
    "`overlong=mask`": Bias(
        {"overlong": "mask", "env": "corridor"},
        {"overlong": "default"},
        {**_PLAIN, "overlong": "mask"},
    ),
    "`keep_variance`": Bias(
        {"keep variance": "0.8"},
        {"keep variance": "default"},
        {**_PLAIN, "keep variance": "0.8", "groups": "2"},
    ),
    "`importance_cap`": Bias(
        {"algorithm": _WEIGHED, "staleness": "1|mask", "played by": "an older policy"},
        _EXACT_WEIGHTS,
        {**_PLAIN, "staleness": "1"},
    ),
    "`staleness_rule=mask`": Bias(
        {"staleness": "mask"},
        {"staleness": "1"},
        {**_PLAIN, "staleness": "mask", "played by": "the newest policy"},
    ),
    "`staleness_rule=segment`": Bias(
        {"staleness": "segment", "played by": "an older policy"},
        _FRESH,
        {"algorithm": "ppo", "staleness": "segment", **_CRITIC, "end": "default"},
    ),
    "`dpo` of an older policy": Bias(
        {"algorithm": "dpo", "played by": "an older policy", "staleness": "1|mask|segment"},
        _FRESH,
        {"algorithm": "dpo", "staleness": "1", "normalizer": "1.0", **_EXACT_WEIGHTS},
    ),
    "`gamma`, `group_mean`": Bias(
        {"advantage": "group_mean", "credit": "to go", "gamma": "0.5"},
        {"advantage": "leave_one_out"},
        {
            "algorithm": "grpo",
            "advantage": "group_mean",
            "credit": "to go",
            "gamma": "0.5",
            "normalizer": "1.0",
        },
    ),
}
"""What is biased by design, by the name in docs/oracles.md, which has the figures."""

_DEFAULTS: Mapping[str, Sequence[Row]] = {
    "advantage": (
        {"algorithm": _GROUPS, "is": "group_std"},
        {"algorithm": "rloo", "is": "leave_one_out"},
    ),
    "normalizer": (
        {"algorithm": "gspo", "is": "trajectories"},
        {"algorithm": _WEIGHED, "surrogate": "gspo", "is": "trajectories"},
        {"algorithm": _WEIGHED, "is": "tokens"},
    ),
}
"""What the default of a factor is for some algorithms."""


def spelled(row: Row) -> Row:
    """The same row with the defaults that are biased for some algorithms written out."""
    found = dict(row)
    for factor, cases in _DEFAULTS.items():
        for case in cases:
            fits = all(
                value(row, key) in labels.split("|") for key, labels in case.items() if key != "is"
            )
            if value(found, factor) == "default" and fits:
                found[factor] = case["is"]
    return found


def biases_of(row: Row) -> list[str]:
    """What is biased in a row."""
    found = [name for name, bias in BIASES.items() if bias.is_in(spelled(row))]
    return [name for name in found if f"{name}, one episode" not in found]


def without(row: Row, names: Iterable[str]) -> Row:
    """The row with its unbiased values in place of these."""
    found = dict(spelled(row))
    for name in names:
        found |= BIASES[name].instead
    return found


def unbiased(row: Row) -> list[Row]:
    """Rows like this one whose gradient has to be the true one.

    Where groups are filtered, what is left of the terms that each token answers for itself is that
    of mixed groups. So such a row is tried without the filter, and without these terms.
    """
    row = without(row, biases_of(row))
    row = without(row, biases_of(row))  # some are replaced by what is biased too
    terms = {"kl": "default", "kl_reward": "default", "entropy": "default"}
    if value(row, "filter") == "default" or all(value(row, term) == "default" for term in terms):
        return [row]
    return [{**row, "filter": "default"}, {**row, **terms}]
