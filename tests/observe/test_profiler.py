"""Profiles: known times are attributed exactly, traces are Perfetto's, and a live run records when
it is asked to.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as PerfettoTrace
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from agentrl.errors import ConfigError
from agentrl.files.durable import write_whole
from agentrl.flow import SpanLog, record_spans, run_steadily, span
from agentrl.observe.profiler import FOLDER, Profiler
from agentrl.observe.trace_file import Slice, TraceFile, read_trace
from agentrl.observe.usage import Usage
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.simulate.config import SimulatedEngineConfig, SimulatedEnvsConfig, SimulationConfig
from agentrl.simulate.latency import Constant
from agentrl.simulate.world import World
from agentrl.trajectory import Score
from agentrl.viewer.timing import busy_sets
from agentrl.viewer.traced import newest_trace, without
from tests.processes import PATIENCE_SECONDS

STEPS, TURNS = 3, 4


class SlowReward:
    async def score(self, trajectory):
        await asyncio.sleep(2.0)
        return Score(1.0)


def play_known_times() -> None:
    """One episode at a time, of which every second is known."""
    rollout = RolloutConfig(groups_per_step=1, group_size=1, budget=Budget(turns=TURNS))
    simulation = SimulationConfig(
        engine=SimulatedEngineConfig(seconds_per_token=0.5, answer_tokens=Constant(value=6)),
        env=SimulatedEnvsConfig(
            turns=Constant(value=TURNS),
            reset_seconds=Constant(value=1),
            step_seconds=Constant(value=5),
        ),
        train_seconds=Constant(value=7),
        update_seconds=Constant(value=0.5),
    )
    World(rollout, simulation, STEPS, reward=SlowReward()).run()


def test_every_second_of_a_run_is_attributed_to_what_was_busy_in_it():
    with record_spans(SpanLog()) as log:
        play_known_times()
    found: dict[str, list[tuple[float, float]]] = {}
    for one in log.take():
        found.setdefault(one.resource, []).append((one.begin, one.end))
    seconds = busy_sets(found, 0.0, max(end for spans in found.values() for _, end in spans))
    assert {
        "+".join(names): pytest.approx(value) for names, value in seconds.items() if value > 1e-6
    } == {
        "environments": STEPS * (1 + 5 * TURNS),
        "engine": STEPS * 0.5 * 6 * TURNS,
        "trainer": STEPS * 7,
        "rewards": STEPS * 2,
        "weights": STEPS * 0.5,
    }


def test_nothing_is_recorded_outside_of_a_recording():
    log = SpanLog()
    play_known_times()
    with record_spans(log):
        pass
    assert log.take() == []


spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 10), st.sampled_from(["engine", "rewards"])),
    min_size=1,
    max_size=30,
)


@given(drawn=spans)
def test_slices_of_a_lane_never_overlap_and_the_trace_is_perfettos(drawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")

    async def play() -> None:
        async def one(begin: int, length: int, resource: str) -> None:
            await asyncio.sleep(begin / 1e4)
            with span(resource, "work", 1):
                await asyncio.sleep(length / 1e4)

        async with asyncio.TaskGroup() as group:
            for begin, length, resource in drawn:
                group.create_task(one(begin, length, resource))

    with Profiler(folder, always=True):
        run_steadily(play())
    (path,) = (folder / FOLDER).iterdir()
    trace = read_trace(path)
    worked = [one for one in trace.slices if one.name == "work"]
    assert sorted(one.group for one in worked) == sorted(f"{resource} 1" for *_, resource in drawn)
    for lane in {(one.group, one.lane) for one in worked}:
        own = sorted((one.begin, one.end) for one in worked if (one.group, one.lane) == lane)
        assert all(later[0] >= earlier[1] for earlier, later in pairwise(own))
    check_by_perfettos_own_classes(path, len(trace.slices))


def check_by_perfettos_own_classes(path: Path, slices: int) -> None:
    parsed = PerfettoTrace.FromString(path.read_bytes())
    described = {
        packet.track_descriptor.uuid
        for packet in parsed.packet
        if packet.HasField("track_descriptor")
    }
    events = [packet.track_event for packet in parsed.packet if packet.HasField("track_event")]
    assert {event.track_uuid for event in events} <= described
    assert all(packet.trusted_packet_sequence_id for packet in parsed.packet)
    begun = [event for event in events if event.type == TrackEvent.TYPE_SLICE_BEGIN]
    ended = [event for event in events if event.type == TrackEvent.TYPE_SLICE_END]
    assert len(begun) == len(ended) == slices
    assert all(event.name for event in begun)
    assert not any(packet.ByteSize() and packet.ListFields() == [] for packet in parsed.packet)


def test_a_trace_that_breaks_off_is_read_up_to_its_last_whole_packet(tmp_path):
    path = tmp_path / "trace.pftrace"
    with TraceFile(path) as file:
        for number in range(4):
            file.slice(Slice("engine 0", "0", f"answer {number}", 1e9 + number, 1e9 + number + 0.5))
        file.level("CPU", "worker", "%", 1e9, 50.0)
        file.level("CPU", "worker", "%", 1e9 + 10, 0.0)
    whole = read_trace(path)
    assert [one.name for one in whole.slices] == [f"answer {number}" for number in range(4)]
    assert whole.slices[3] == Slice("engine 0", "0", "answer 3", 1e9 + 3, 1e9 + 3.5)
    assert whole.mean("CPU", "worker", 1e9, 1e9 + 20) == pytest.approx(25)
    raw = path.read_bytes()
    for cut in range(0, len(raw), 3):
        path.write_bytes(raw[:cut])
        assert read_trace(path).slices == whole.slices[: len(read_trace(path).slices)]


def test_the_time_of_recording_is_subtracted_where_the_controller_worked_then_where_nothing_did():
    one, idle, other = (
        frozenset({"controller"}),
        frozenset[str](),
        frozenset({"controller", "engine"}),
    )
    busy = {one: 3.0, other: 1.0, idle: 6.0, frozenset({"trainer"}): 5.0}
    assert without(busy, 2.0) == {idle: 6.0, frozenset({"trainer"}): 5.0, one: 1.5, other: 0.5}
    assert without(busy, 5.0) == {idle: 5.0, frozenset({"trainer"}): 5.0, one: 0.0, other: 0.0}
    assert sum(without(busy, 5.0).values()) == pytest.approx(sum(busy.values()) - 5.0)


def test_a_trace_has_the_phases_the_loops_own_work_and_the_load_of_threads(tmp_path):
    async def work() -> None:
        profiler.begin_phase(0, "rollout", time_now())
        with span("engine", "generate", 0):
            await asyncio.sleep(0.05)
        profiler.begin_phase(0, "train", time_now())
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0)

    with Profiler(tmp_path, always=True) as profiler:
        run_steadily(work())
    traced = newest_trace(tmp_path, None)
    assert traced is not None
    assert [one.name for one in traced.trace.slices if one.group == "phases"] == [
        "rollout 0",
        "train 0",
    ]
    loop = [one for one in traced.trace.slices if one.group == "controller"]
    assert max(one.end - one.begin for one in loop) >= 0.05
    assert traced.controller * (traced.end - traced.begin) > 0.04
    assert traced.tracing > 0
    assert sum(traced.busy.values()) == pytest.approx(traced.seconds)
    assert ("controller: event loop", "CPU") in [(name, kind) for name, kind, _ in traced.workers()]


def time_now() -> float:
    from datetime import UTC, datetime

    return datetime.now(UTC).timestamp()


def test_weights_that_are_committed_while_requests_wait_are_no_time_of_sampling(tmp_path):
    with TraceFile(tmp_path / FOLDER / "known.pftrace") as file:
        file.slice(Slice("engine 0", "0", "generate", 1e9, 1e9 + 8))
        file.slice(Slice("weights", "0", "stage", 1e9 + 1, 1e9 + 2))
        file.slice(Slice("weights", "0", "commit", 1e9 + 2, 1e9 + 4))
        file.slice(Slice("trainer 0", "0", "step", 1e9 + 8, 1e9 + 10))
    traced = newest_trace(tmp_path, None)
    assert traced is not None
    assert traced.sampling == pytest.approx(0.6)
    assert traced.answers == pytest.approx(0.8)
    assert traced.busy[frozenset({"engine", "weights"})] == pytest.approx(3)
    assert ("trainer 0", "busy", pytest.approx(20)) in traced.workers()
    cut = newest_trace(tmp_path, [(1e9 + 8, 1e9 + 9), (1e9 + 9, 1e9 + 30)])
    assert cut is not None
    assert (cut.begin, cut.end) == (1e9 + 8, 1e9 + 10)
    assert newest_trace(tmp_path, [(1e9 + 50, 1e9 + 60)]) is None


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until, "it has not come true"
        time.sleep(0.01)


def wait_for(path: Path) -> Path:
    wait_until(path.exists)
    return path


def test_a_live_run_records_when_a_file_asks_for_it_and_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.observe.profiler._TICK_SECONDS", 0.01)
    folder = tmp_path / FOLDER
    folder.mkdir()
    with Profiler(tmp_path, always=False):
        write_whole(folder / "one.request", "0.05\n")
        trace = read_trace(wait_for(folder / "one.pftrace"))
        assert trace.end > trace.begin
        write_whole(folder / "wrong.request", "soon\n")
        assert "soon" in wait_for(folder / "wrong.failed").read_text()
        wait_until(lambda: not (folder / "wrong.request").exists())
        (folder / "wrong.failed").unlink()
        write_whole(folder / "wrong.request", "later\n")  # a name may come again
        assert "later" in wait_for(folder / "wrong.failed").read_text()
        write_whole(folder / "long.request", "600\n")
        wait_for(folder / ".unfinished-long.pftrace")
        write_whole(folder / "second.request", "1\n")
        assert "another trace" in wait_for(folder / "second.failed").read_text()
    assert (folder / "long.pftrace").exists()  # the run's end ends the trace
    assert not list(folder.glob("*.request"))


def test_a_request_that_cannot_be_answered_is_said_once_and_ends_nothing(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("agentrl.observe.profiler._TICK_SECONDS", 0.01)
    folder = tmp_path / FOLDER
    (folder / "wrong.failed" / "in the way").mkdir(parents=True)  # as if it were another user's
    write_whole(folder / "wrong.request", "soon\n")
    with Profiler(tmp_path, always=False):
        wait_until(lambda: caplog.records)
        write_whole(folder / "one.request", "0.05\n")
        wait_for(folder / "one.pftrace")
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"{folder / 'wrong.request'} cannot be answered: ")


def test_the_load_of_gpus_is_read_where_there_are_any(monkeypatch):
    """By a stand-in for NVIDIA's library, since tests run without GPUs."""
    from types import SimpleNamespace

    class NVMLError(Exception):
        pass

    stand_in = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=40 + handle),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1, total=4),
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", stand_in)
    assert Usage().gpus() == {"GPU 0": 40.0, "GPU 1": 41.0}

    def no_driver():
        raise NVMLError

    stand_in.nvmlInit = no_driver
    assert Usage().gpus() == {}


def test_without_its_packages_a_run_with_a_profile_is_refused_before_it_starts(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(__import__("sys").modules, "perfetto.protos.perfetto.trace", None)
    with (
        pytest.raises(ConfigError, match=r"agentrl-train\[profile\]"),
        Profiler(tmp_path, always=True),
    ):
        pass
