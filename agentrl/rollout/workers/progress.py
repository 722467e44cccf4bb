"""The turns of running episodes, on their way to the controller: only new turns are sent.

worker:      ProgressSender.changes(segments) ─▶ SegmentChanges
controller:  ProgressReader.segments(changes) ─▶ the segments as they were
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.trajectory import Trajectory, Turn


@dataclass(frozen=True, slots=True)
class SegmentChanges:
    """Segments without the turns that have been sent before."""

    segments: tuple[Trajectory, ...]
    known: tuple[int, ...]
    """Of each segment, how many of the turns sent before come first."""


class ProgressSender:
    """What has been sent of an episode."""

    def __init__(self) -> None:
        self._sent: dict[str, Sequence[Turn]] = {}

    def changes(self, segments: tuple[Trajectory, ...]) -> SegmentChanges:
        """The segments without the turns that have been sent before. A turn that has changed since
        then is sent again.
        """
        known = tuple(
            _common_prefix(self._sent.get(segment.agent, ()), segment.turns) for segment in segments
        )
        self._sent = {segment.agent: segment.turns for segment in segments}
        return SegmentChanges(
            tuple(
                replace(segment, turns=segment.turns[count:])
                for segment, count in zip(segments, known, strict=True)
            ),
            known,
        )


class ProgressReader:
    """What has arrived of an episode."""

    def __init__(self) -> None:
        self._seen: dict[str, Sequence[Turn]] = {}

    def segments(self, changes: SegmentChanges) -> tuple[Trajectory, ...]:
        """The segments with all of their turns."""
        whole = tuple(
            replace(segment, turns=(*self._seen.get(segment.agent, ())[:count], *segment.turns))
            for segment, count in zip(changes.segments, changes.known, strict=True)
        )
        self._seen = {segment.agent: segment.turns for segment in whole}
        return whole


def _common_prefix(before: Sequence[Turn], after: Sequence[Turn]) -> int:
    """The number of turns at the beginning that are the same objects."""
    count = 0
    for old, new in zip(before, after, strict=False):
        if old is not new:
            break
        count += 1
    return count
