"""What may be done with groups and their advantages under an algorithm: normalising them, and
leaving some out.

A group may be left out only if that is seen from the group alone, and only if it then would have
taught nothing, or less than others. Otherwise the expected gradient is another one: with
`reinforce`, which learns as much from groups whose members all earned the same, it may even point
backwards.
"""

from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.protocols.algorithm import (
    ActorCritic,
    Algorithm,
    LearnsFromBatches,
    MeasuresSpread,
    NormalizesAdvantages,
)


def check_groups(
    name: str, algorithm: Algorithm, processing: BatchProcessingConfig, *, filters: bool
) -> None:
    """Check what a config says of groups and advantages against the algorithm of this name.
    `filters`: whether `rollout.filter_zero_variance` is on.

    Raises:
        ValueError: the algorithm cannot have it.
    """
    normalize = processing.normalize
    if normalize != "group" and getattr(algorithm, "fixed_scale", False):
        raise ValueError(
            f"batch_processing.normalize={normalize} divides advantages by their spread, and those"
            f" of {name} are labels or weights, whose size means something: leave it out"
        )
    settings = {
        "rollout.filter_zero_variance=false": filters,
        "batch_processing.keep_variance=1": processing.keep_variance < 1,
    }
    for off in (off for off, is_on in settings.items() if is_on):
        if why := _cannot_leave_out(algorithm) or _cannot_normalise_too(algorithm, normalize):
            setting = off.partition("=")[0]
            raise ValueError(
                f"{setting} leaves out groups whose advantages are all 0, and {name} {why}: write"
                f" {off}"
            )
    if processing.keep_variance < 1 and not _compares(algorithm):
        raise ValueError(
            f"batch_processing.keep_variance keeps the groups whose members differ most, and {name}"
            " does not compare the members of a group: it learns as much from the others, and"
            " without them its gradient may point backwards. Write"
            " batch_processing.keep_variance=1, or choose an algorithm that compares (grpo, rloo)"
        )


def _compares(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, MeasuresSpread) or bool(
        getattr(algorithm, "compares_members", False)
    )


def _cannot_leave_out(algorithm: Algorithm) -> str:
    """The reasons why a group alone does not tell what the algorithm learns from it."""
    if isinstance(algorithm, ActorCritic):
        return "asks a critic for them, so the group does not tell"
    if isinstance(algorithm, LearnsFromBatches):
        return (
            "compares with what earlier batches have earned, which may have moved until the group"
            " is trained on"
        )
    if isinstance(algorithm, NormalizesAdvantages):
        return "compares with the whole batch, so the group does not tell"
    if beyond := getattr(algorithm, "beyond_rewards", ""):
        return f"adds to them what no reward says ({beyond}), so the group does not tell"
    return ""


def _cannot_normalise_too(algorithm: Algorithm, normalize: str) -> str:
    if normalize == "group" or (
        _compares(algorithm) and not getattr(algorithm, "credits_turns", False)
    ):
        return ""
    whose = (
        "of single turns (reward_to_go), which"
        if getattr(algorithm, "credits_turns", False)
        else "that"
    )
    return (
        f"has advantages {whose} do not add up to 0 in a group, so that"
        f" batch_processing.normalize={normalize} would move those that are 0"
    )
