"""Traces of a run in Perfetto's format: https://ui.perfetto.dev opens them.

A trace is a stream of packets, so it can be read while it grows, and after a crash up to the last
whole packet. The tracks have two levels: a group, such as `engine 0`, and in it a lane for each
span that is open at the same time, or a counter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

from agentrl.errors import ConfigError
from agentrl.package.distribution import install_command

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

_SEQUENCE = 1
_PACKET_FIELD = b"\n"  # the tag of `Trace.packet`: field 1, with a length
_NANO = 10**9


class Slice(NamedTuple):
    """Something that went on from `begin` to `end`, in Unix seconds, on a lane of a group."""

    group: str
    lane: str
    name: str
    begin: float
    end: float


class Level(NamedTuple):
    """The value of a counter from `begin` to `end`, in Unix seconds."""

    begin: float
    end: float
    value: float


class TraceFile:
    """Writes a trace. A context manager; what has been written is in the file after `flush`.

    Raises:
        ConfigError: the package `perfetto` is not installed.
    """

    def __init__(self, path: Path) -> None:
        _protos()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._tracks: dict[tuple[str, ...], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def flush(self) -> None:
        """Hand what has been written to the system."""
        self._file.flush()

    def slice(self, one: Slice, about: Mapping[str, str] | None = None) -> None:
        """Write a slice. Slices of a lane must not overlap, unless one is inside the other."""
        track, event = self._track(one.group, one.lane), _protos().TrackEvent
        packet = self._event(track, event.TYPE_SLICE_BEGIN, one.begin)
        packet.track_event.name = one.name
        for name, value in (about or {}).items():
            note = packet.track_event.debug_annotations.add()
            note.name, note.string_value = name, value
        self._write(packet)
        self._write(self._event(track, event.TYPE_SLICE_END, max(one.begin, one.end)))

    def level(self, group: str, counter: str, unit: str, at: float, value: float) -> None:
        """Write the value of a counter from the time `at` until the next one. Times must ascend."""
        packet = self._event(
            self._track(group, counter, unit), _protos().TrackEvent.TYPE_COUNTER, at
        )
        packet.track_event.double_counter_value = value
        self._write(packet)

    def _event(self, track: int, kind: int, at: float) -> "TracePacket":
        packet = _protos().TracePacket()
        packet.timestamp = round(at * _NANO)
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _track(self, *names: str) -> int:
        """The number of a group (group,), lane (group, lane) or counter (group, counter, unit)."""
        if (known := self._tracks.get(names)) is not None:
            return known
        number = self._tracks[names] = len(self._tracks) + 1
        packet = _protos().TracePacket()
        packet.trusted_packet_sequence_id = _SEQUENCE
        track = packet.track_descriptor
        track.uuid, track.name = number, names[min(1, len(names) - 1)]
        if len(names) > 1:
            track.parent_uuid = self._track(names[0])
        if len(names) > 2:
            track.counter.unit_name = names[2]
        self._write(packet)
        return number

    def _write(self, packet: "TracePacket") -> None:
        from google.protobuf import proto

        self._file.write(_PACKET_FIELD)
        proto.serialize_length_prefixed(packet, self._file)


@dataclass(slots=True)
class Trace:
    """The content of a trace. `levels` are by group and counter."""

    slices: list[Slice] = field(default_factory=list)
    levels: dict[tuple[str, str], list[Level]] = field(default_factory=dict)

    @property
    def begin(self) -> float:
        """The beginning of the first slice or counter; 0 if there is none."""
        return min(
            [one.begin for one in self.slices] + [found[0].begin for found in self.levels.values()],
            default=0.0,
        )

    @property
    def end(self) -> float:
        """The end of the last slice or counter; 0 if there is none."""
        return max(
            [one.end for one in self.slices] + [found[-1].end for found in self.levels.values()],
            default=0.0,
        )

    def mean(self, group: str, counter: str, begin: float, end: float) -> float:
        """The mean of a counter over a time, with 0 where it has no value."""
        found: Sequence[Level] = self.levels.get((group, counter), ())
        summed = sum(
            one.value * max(0.0, min(one.end, end) - max(one.begin, begin)) for one in found
        )
        return summed / max(end - begin, 1e-9)


def read_trace(path: Path) -> Trace:
    """Read a trace that `TraceFile` has written; one that is still written, up to its last whole
    packet.

    Raises:
        ConfigError: the file cannot be read, or the package `perfetto` is not installed.
    """
    reader = _Reader()
    try:
        with path.open("rb") as file:
            while (packet := _next_packet(file)) is not None:
                reader.read(packet)
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from error
    return reader.trace


class _Reader:
    """Puts the packets of a trace together."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._names: dict[int, str] = {}
        self._parents: dict[int, int] = {}
        self._open: dict[int, list[tuple[str, float]]] = {}

    def read(self, packet: "TracePacket") -> None:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            self._names[track.uuid] = track.name
            self._parents[track.uuid] = track.parent_uuid
            return
        event, at, kinds = packet.track_event, packet.timestamp / _NANO, _protos().TrackEvent
        group = self._names.get(self._parents.get(event.track_uuid, 0), "")
        name = self._names.get(event.track_uuid, "")
        if event.type == kinds.TYPE_SLICE_BEGIN:
            self._open.setdefault(event.track_uuid, []).append((event.name, at))
        elif event.type == kinds.TYPE_SLICE_END and self._open.get(event.track_uuid):
            label, begin = self._open[event.track_uuid].pop()
            self.trace.slices.append(Slice(group, name, label, begin, at))
        elif event.type == kinds.TYPE_COUNTER:
            found = self.trace.levels.setdefault((group, name), [])
            if found:
                found[-1] = found[-1]._replace(end=at)
            found.append(Level(at, at, event.double_counter_value))


def _next_packet(file: IO[bytes]) -> "TracePacket | None":
    """The next packet; None at the end, and where the file breaks off."""
    from google.protobuf import proto
    from google.protobuf.message import DecodeError

    if file.read(1) != _PACKET_FIELD:
        return None
    try:
        packet: TracePacket | None = proto.parse_length_prefixed(_protos().TracePacket, file)
    except (DecodeError, ValueError, EOFError):
        return None
    return packet


def _protos() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise ConfigError(
            f"profiles are written and read with perfetto: {install_command('profile')}"
        ) from error
    return perfetto_trace_pb2
