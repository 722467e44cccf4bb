"""Warnings about training that cannot succeed, from the metrics that a run writes:
docs/why-it-does-not-learn.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.observe.falls import Alarm, History
from agentrl.rollout.budget import Budget

Row = Mapping[str, Any]
IN_A_ROW = 3
"""Consecutive steps before a condition is reported."""
_GAP = 0.1
"""Largest mean gap between an engine in bfloat16 and a trainer that is normal, in nats."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A state of a step in which little can be learned, and what to do about it."""

    holds: Callable[[Row], bool]
    text: Callable[[Row], str]
    metrics: tuple[str, ...]
    """Names of the metrics (`Alarm`)."""
    steps: int = IN_A_ROW
    """Consecutive steps before it is reported."""
    blames_tasks: bool = False
    """True if its text blames the tasks: it is not reported while success is lost, which has
    another cause."""


def conditions(
    max_tokens: int, budget: Budget, *, compares_groups: bool, extends: bool = True
) -> Sequence[Condition]:
    """The conditions to look for.

    `compares_groups`: the algorithm learns only from groups with different scores. `extends`: a
    conversation forks only where it is meant to (`model.history`).
    """
    limits = ", ".join(f"{name}={limit:g}" for name, limit in budget if limit is not None)
    found = [
        Condition(
            lambda row: row.get("cut_answers", 0.0) >= 0.5,
            lambda row: (
                f"{row['cut_answers']:.0%} of the answers were cut at"
                f" rollout.sampling.max_tokens={max_tokens}: raise it, or ask for shorter answers"
            ),
            ("cut_answers",),
        ),
        Condition(
            lambda row: row.get("truncated", 0.0) >= 0.9,
            lambda row: (
                f"{row['truncated']:.0%} of the episodes were cut off, at rollout.budget ({limits})"
                " or at the engine's context: raise it, or end episodes earlier"
            ),
            ("truncated",),
        ),
        Condition(
            lambda row: row.get("grad_norm") == 0.0,
            lambda row: "the gradient was zero: the advantages of all tokens are zero, or clipped",
            ("grad_norm",),
            blames_tasks=True,
        ),
    ]
    found += _HEALTH
    if not extends:
        found.append(
            Condition(
                lambda row: row.get("forked_share", 0.0) >= 0.1,
                lambda row: (
                    f"{row['forked_share']:.0%} of the later turns forked: the chat template"
                    " changes earlier turns, so whole prompts are computed again, and samples are"
                    " many and short. Write model.history=extend"
                ),
                ("forked_share",),
            )
        )
    if compares_groups:
        found.append(
            Condition(
                lambda row: row.get("mixed_groups", 1.0) < 0.1,
                lambda row: (
                    "all members of"
                    f" {'each group' if row['mixed_groups'] == 0 else 'nine groups in ten'} scored"
                    f" the same (mean reward {row['reward']:.3g}), so"
                    f" {'nothing' if row['mixed_groups'] == 0 else 'little'} can be learned: the"
                    f" tasks are {_describe_difficulty(row)}. Try other tasks, a larger"
                    f" rollout.group_size, or recipe.demonstrations{_bonus_note(row)}"
                ),
                ("mixed_groups",),
                blames_tasks=True,
            )
        )
    return found


def _describe_difficulty(row: Row) -> str:
    success = row.get("success", 0.5)
    if success >= 0.9:
        return "too easy"
    return "too hard" if success <= 0.1 else "too hard or too easy"


def _bonus_note(row: Row) -> str:
    """A note for losses with a bonus on entropy: without a signal from groups, the bonus acts
    alone.
    """
    if row["mixed_groups"] > 0 or "policy_entropy" not in row:
        return ""
    return (
        ". Meanwhile algorithm.entropy_bonus alone moves the policy, towards chance (entropy "
        f"{row['policy_entropy']:.2g} nats): lower it, and go back to an earlier checkpoint"
    )


def _blocks_without_gradient(row: Row) -> list[str]:
    return [
        name for name, value in row.items() if name.startswith("grad_norm/blocks/") and value == 0.0
    ]


_SAME = 0.95
"""Share of episodes with the same answers from which on the policy hardly reads its tasks."""
_CONSTANT = (
    "success is what this constant earns. Take tasks on which no constant answer is paid for more"
    " often than others, start from an earlier checkpoint with a lower trainer.lr, or raise"
    " algorithm.entropy_bonus"
)
_HEALTH = (
    Condition(
        lambda row: row.get("same_answers", 0.0) >= _SAME and not row.get("success", 1.0) >= 0.9,
        lambda row: (
            f"{row['same_answers']:.1%} of the episodes have the same answer to different tasks:"
            f" {_CONSTANT}"
        ),
        ("same_answers", "success"),
    ),
    Condition(
        lambda row: row.get("different_starts", 0.0) > 0.0,
        lambda row: (
            f"in {row['different_starts']:.0%} of the groups, members began with different prompts,"
            " so rewards for different tasks are compared: the environment ignores its seed, or"
            " draws from a generator that it did not make from it (`agentrl check-env NAME` tells"
            " where); a program may write something at random"
        ),
        ("different_starts",),
        steps=1,
    ),
    Condition(
        lambda row: row.get("health/effective_sample_size", 1.0) < 0.5,
        lambda row: (
            "engine and trainer give the tokens so different probabilities that only"
            f" {row['health/effective_sample_size']:.0%} of them count: lower"
            " rollout.max_staleness, and see health/logprob_gap/0, which is a"
            " difference of the two programs"
        ),
        ("health/effective_sample_size",),
    ),
    Condition(
        lambda row: row.get("health/logprob_gap/0", 0.0) > _GAP,
        lambda row: (
            "tokens that the engine samples under the trainer's present weights have other"
            f" logprobs than the trainer's, by {row['health/logprob_gap/0']:.2g} nats on average:"
            " either updates do not arrive whole, as adapters that are merged into weights in"
            " bfloat16 (engine.adapters, engine.dtype), or they are sampled over older KV"
            " (engine.kv_on_update), or the two programs differ (engine.quantization,"
            " engine.kv_cache_dtype, docs/model-families.md)"
        ),
        ("health/logprob_gap/0",),
    ),
    Condition(
        lambda row: row.get("health/ratio_p99", 1.0) > 3 or row.get("health/ratio_p1", 1.0) < 1 / 3,
        lambda row: (
            f"within a step, one token in a hundred becomes {row['health/ratio_p99']:.2g} times as"
            f" likely, or {row['health/ratio_p1']:.2g} times: lower trainer.lr or"
            " trainer.minibatches"
        ),
        ("health/ratio_p99", "health/ratio_p1"),
    ),
    Condition(
        lambda row: row.get("clipped_low", 0.0) + row.get("clipped_high", 0.0) > 0.3,
        lambda row: (
            f"{row.get('clipped_low', 0.0) + row.get('clipped_high', 0.0):.0%} of the tokens are"
            " clipped and teach nothing: lower trainer.lr or trainer.minibatches"
        ),
        ("clipped_low", "clipped_high"),
    ),
    Condition(
        lambda row: row.get("reasoning/cut", 0.0) > 0.3,
        lambda row: (
            f"{row['reasoning/cut']:.0%} of the answers are cut within their reasoning, and say"
            " nothing after it: raise rollout.sampling.max_tokens, or charge for length (the"
            " reward `length`)"
        ),
        ("reasoning/cut",),
    ),
    Condition(
        lambda row: row.get("grad_norm", 0.0) > 0.0 and bool(_blocks_without_gradient(row)),
        lambda row: (
            "no gradient reaches a part of the model's blocks"
            f" ({', '.join(_blocks_without_gradient(row))} are 0), while others learn: see which of"
            " its parameters are frozen, and trainer.lora.targets"
        ),
        ("grad_norm/blocks/1", "grad_norm/blocks/2", "grad_norm/blocks/3", "grad_norm/blocks/4"),
    ),
    Condition(
        lambda row: row.get("health/repetition", 0.0) > 0.3,
        lambda row: (
            f"{row['health/repetition']:.0%} of what the model writes repeats passages of the same"
            " answer: look at episodes (`agentrl view`), lower trainer.lr, or go back to an"
            " earlier checkpoint"
        ),
        ("health/repetition",),
    ),
    Condition(
        lambda row: row.get("health/length_correlation", 0.0) > 0.8,
        lambda row: (
            "the score rises with the length of an episode (correlation"
            f" {row['health/length_correlation']:.2f}): look whether length itself is paid for; the"
            " reward `length` can charge for it"
        ),
        ("health/length_correlation",),
    ),
    Condition(
        lambda row: row.get("health/disagreement", 0.0) > 0.5,
        lambda row: (
            f"two parts of the reward order {row['health/disagreement']:.0%} of the members"
            " differently, which may mean that one of them is exploited: compare reward/..., and"
            " look at episodes where they differ (`agentrl view`)"
        ),
        ("health/disagreement",),
    ),
    Condition(
        lambda row: row.get("entropy", 1.0) < 0.02 and row.get("success", 1.0) < 0.5,
        lambda row: (
            f"the policy hardly tries anything any more (entropy {row['entropy']:.2g} nats) and"
            f" succeeds in {row['success']:.0%}: raise algorithm.entropy_bonus or"
            " algorithm.clip_high, from an earlier checkpoint"
        ),
        ("entropy", "success"),
    ),
)
"""Signs of health (`agentrl/observe/health.py`) that ask for a look."""


@dataclass(slots=True)
class Silence:
    """Reads the rows of `metrics.jsonl` in order; gives each warning once, and again only after its
    condition has ended.
    """

    conditions: Sequence[Condition]
    _in_a_row: dict[int, int] = field(default_factory=dict)
    _history: History = field(default_factory=History)
    _constant: bool = False
    _constant_suites: set[str] = field(default_factory=set)
    _first: Row | None = None
    _fell: bool = False
    _player: float = 0.0

    def read(self, row: Row) -> list[Alarm]:
        """The warnings that this row gives rise to."""
        self._player = row.get("demonstrations/success", self._player)
        if "eval/success" in row:
            return self._read_evaluation(row)
        if any(name.startswith("eval/") for name in row):
            return self._read_suite(row)
        return self._read_step(row)

    def _read_suite(self, row: Row) -> list[Alarm]:
        """The warnings of an evaluation of a suite, which is no step and ends no condition of
        steps.
        """
        warnings: list[Alarm] = []
        for name, share in row.items():
            suite = name.removeprefix("eval/").removesuffix("/same_answers")
            if name != f"eval/{suite}/same_answers":
                continue
            constant = share >= _SAME and not row[f"eval/{suite}/success"] >= 0.9
            if constant and suite not in self._constant_suites:
                text = (
                    f"after {row['step']} steps, {share:.1%} of the episodes of {suite} have the"
                    f" same answer to different tasks: {_CONSTANT}"
                )
                warnings.append(Alarm(text, (f"eval/{suite}/success", name)))
            if constant:
                self._constant_suites.add(suite)
            else:
                self._constant_suites.discard(suite)
        return warnings

    def _read_step(self, row: Row) -> list[Alarm]:
        warnings = [
            Alarm(f"in step {row['step']}: {alarm.text}", alarm.metrics)
            for alarm in self._history.read(row)
        ]
        for number, condition in enumerate(self.conditions):
            holds = condition.holds(row) and not (condition.blames_tasks and self._history.fallen)
            count = self._in_a_row[number] = self._in_a_row.get(number, 0) + 1 if holds else 0
            if count == condition.steps:
                when = f"in {count} steps in a row, up to step" if count > 1 else "in step"
                warnings.append(
                    Alarm(f"{when} {row['step']}: {condition.text(row)}", condition.metrics)
                )
        return warnings

    def _read_evaluation(self, row: Row) -> list[Alarm]:
        warnings: list[str] = []
        if self._first is None:
            self._first = row
            if row.get("eval/success_high", 1.0) < self._player / 2:
                warnings.append(
                    f"the model that imitated succeeds in {row['eval/success']:.1%} of the held-out"
                    f" tasks, and its player in {self._player:.1%}: raise"
                    " recipe.demonstrations.episodes, epochs or lr, or take a player that uses"
                    " only what the model sees"
                )
        constant = row.get("eval/same_answers", 0.0) >= _SAME and not row["eval/success"] >= 0.9
        if constant and not self._constant:
            warnings.append(
                f"after {row['step']} steps, {row['eval/same_answers']:.1%} of the held-out"
                f" episodes have the same answer to different tasks: {_CONSTANT}"
            )
        self._constant = constant
        below = row.get("eval/success_high", 1.0) < self._first.get("eval/success_low", 0.0)
        is_new, self._fell = below and not self._fell, below
        if is_new:
            warnings.append(
                f"after {row['step']} steps, held-out success ({row['eval/success']:.1%}) is below"
                f" where training began ({self._first['eval/success']:.1%}): lower trainer.lr, or"
                " look at the metrics kl, clipped_low and entropy"
            )
        return [Alarm(text, ("eval/success",)) for text in warnings]
