"""Reads the advantages that an algorithm has returned: numbers of any library become floats, and
what does not fit the group is refused, with an error that names it.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.errors import TrainingError
from agentrl.protocols.algorithm import Advantages, Algorithm, AlgorithmOffers, MemberAdvantage
from agentrl.settings.base import LARGEST
from agentrl.tokens.arrays import dimensions_of, read_number
from agentrl.trajectory import Group, Trajectory


def advantages_of(algorithm: Algorithm, group: Group) -> list[MemberAdvantage]:
    """The advantages of a group's members, by an algorithm.

    Raises:
        TrainingError: what it returned is not one finite number for each member, or one for each of
            a member's turns.
    """
    return _read_group(algorithm.advantages(group), group, f"{type(algorithm).__name__}.advantages")


def normalized_by(
    algorithm: Algorithm, advantages: Advantages, groups: Sequence[Group]
) -> Advantages:
    """The advantages of a batch's groups, as an algorithm normalises them together, if it does.

    Raises:
        TrainingError: as `advantages_of`, or what it returned is not of these groups.
    """
    normalize = AlgorithmOffers.of(algorithm).normalized
    if normalize is None:
        return advantages
    whose = f"{type(algorithm).__name__}.normalized"
    found = _listed(normalize(advantages))
    if found is None or len(found) != len(groups):
        raise TrainingError(
            f"{whose} returned {_described(found)} for {len(groups)} groups: return for each the"
            " advantages of its members"
        )
    return [_read_group(own, group, whose) for own, group in zip(found, groups, strict=True)]


def _read_group(returned: Any, group: Group, whose: str) -> list[MemberAdvantage]:
    found, members = _listed(returned), group.trajectories
    if found is None or len(found) != len(members):
        # Numbers too few or too many would be those of the members, or groups, after them.
        shown = _described(returned if found is None else found)
        raise TrainingError(
            f"{whose} returned {shown} for the {len(members)} members of the group of task"
            f" {group.task.id!r}: return one advantage for each member, in their order"
        )
    return [_read_member(*pair, whose) for pair in zip(found, members, strict=True)]


def _read_member(returned: Any, member: Trajectory, whose: str) -> MemberAdvantage:
    number, listed = read_number(returned), _listed(returned)
    numbers = [number] if listed is None else [read_number(one) for one in listed]
    # NaN compares as false.
    finite = [one for one in numbers if one is not None and abs(one) <= LARGEST]
    if len(finite) < len(numbers) or (listed is not None and len(listed) != len(member.turns)):
        raise TrainingError(
            f"{whose} returned {_described(returned)} for the episode {member.id!r} of"
            f" {len(member.turns)} turns: an advantage is a finite number, of at most {LARGEST:g},"
            " for the episode, or one for each turn"
        )
    return finite[0] if listed is None else finite


def _listed(returned: Any) -> Sequence[Any] | None:
    """The entries of a sequence or of an array; None if it is neither."""
    if dimensions_of(returned):
        returned = returned.tolist()
    is_text = isinstance(returned, str | bytes)
    return returned if isinstance(returned, Sequence) and not is_text else None


def _described(returned: Any) -> str:
    """What was returned, for an error."""
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
        return f"{len(returned)} entries ({returned!r:.80})"
    return f"{returned!r:.80}"
