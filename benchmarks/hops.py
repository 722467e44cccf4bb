"""Counts the hops of the training half and of the playing half of a run.

    python benchmarks/hops.py [--root OTHER_CHECKOUT]

A hop is a call from one of our classes or modules into another. The training half is the paths from
the command to the trainer's update of the weights and to the load of the weights in the engine; the
playing half those to the environment's step, the engine's answer and the reward. Calls inside a
class or module do not count, and hops on several paths of a half count once. The hops are also
counted without `agentrl/flow`, which only passes calls on, as asyncio does. A small model trains
three steps with the local engine, while every call is recorded with its caller, also across tasks
and threads. The output is the hops, the files that they touch, and how many of our functions, in
how many files, are entered from one batch to the next. `--root` counts in another checkout.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HALVES = {
    "training": ("OneDevice.update", "PackedModel.load_weights"),
    "playing": ("FrozenLake.step", "LocalEngine.generate", "EnvironmentReward.score"),
}
"""The functions to which the paths of each half lead."""
STEP = "Rollouts.next_batch"
OVERRIDES = (
    "steps=3",
    "recipe.demonstrations=null",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "evaluation.tasks=0",
    "checkpoint.every=100",
    "trackers=[]",
)


Unit = tuple[str, str]
"""A file, and a class in it or an empty string."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of our functions, and the call that made it."""

    code: CodeType
    caller: "Call | None"

    @property
    def unit(self) -> Unit:
        """The function's file, and its class if it has one."""
        owner, dot, _ = self.code.co_qualname.partition(".")
        return self.code.co_filename, owner if dot and not self.code.co_qualname.startswith(
            f"{owner}.<"
        ) else ""


class Recorder:
    """Records every call of a function under `root` in this process."""

    def __init__(self, root: Path) -> None:
        self._root = str(root) + "/"
        self._ours: dict[CodeType, bool] = {}
        self._calls: dict[FrameType, Call] = {}
        self._begun_by: dict[
            FrameType, Call | None
        ] = {}  # frames of coroutines that tasks will run
        self._thread = threading.local()
        targets = [name for half in HALVES.values() for name in half]
        self.found: dict[str, list[Call]] = {name: [] for name in targets}
        self.steps: list[set[CodeType]] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """See `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not self._is_ours(code) or frame in self._calls:
            return
        call = self._calls[frame] = Call(code, self.caller_of(frame))
        if code.co_qualname in self.found:
            self.found[code.co_qualname].append(call)
        if code.co_qualname == STEP:
            self.steps.append(set())
        if self.steps:
            self.steps[-1].add(code)

    def caller_of(self, frame: FrameType | None) -> Call | None:
        """The call that a frame was called from: up its stack, or where its task or thread was
        started.
        """
        while frame is not None:
            if frame in self._begun_by:
                return self._begun_by[frame]
            frame = frame.f_back
            if frame in self._calls:
                return self._calls[frame]
        return getattr(self._thread, "begun_by", None)

    def begin_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> "asyncio.Task[Any]":
        """See `loop.set_task_factory`."""
        if getattr(coroutine, "cr_frame", None) is not None:
            self._begun_by[coroutine.cr_frame] = self.caller_of(sys._getframe())
        return asyncio.Task(coroutine, loop=loop, **options)

    def in_thread(
        self, begun_by: Call | None, work: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Run the work of a pool as if its submitter had called it."""
        self._thread.begun_by = begun_by
        return work(*args, **options)

    def _is_ours(self, code: CodeType) -> bool:
        if code not in self._ours:
            file, name = code.co_filename, code.co_qualname
            self._ours[code] = (
                file.startswith(self._root) and "/.venv/" not in file and "/benchmarks/" not in file
            )
            self._ours[code] &= not name.endswith(
                ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
            )
        return self._ours[code]


def chain(call: Call | None, left_out: str) -> list[Unit]:
    """The units on the path to a call, without files that have `left_out` in their path; repeats
    count once.
    """
    units: list[Unit] = []
    while call is not None:
        if left_out not in call.unit[0] and (not units or units[-1] != call.unit):
            units.append(call.unit)
        call = call.caller
    return units[::-1]


def hops_of(recorder: Recorder, half: str, left_out: str = "\0") -> list[tuple[Unit, Unit]]:
    """The hops of all paths of a half, each once."""
    ways = [chain(recorder.found[name][-1], left_out) for name in HALVES[half]]
    return list(dict.fromkeys(hop for way in ways for hop in pairwise(way)))


def record(root: Path) -> Recorder:
    """Train, and record the calls."""
    sys.path.insert(0, str(root))
    from agentrl.cli import main

    recorder = Recorder(root)
    submit, run_forever = ThreadPoolExecutor.submit, asyncio.BaseEventLoop.run_forever

    def submitted(pool: ThreadPoolExecutor, work: Any, /, *args: Any, **options: Any) -> Any:
        return submit(
            pool, recorder.in_thread, recorder.caller_of(sys._getframe()), work, *args, **options
        )

    def running(loop: asyncio.BaseEventLoop) -> None:
        loop.set_task_factory(recorder.begin_task)
        run_forever(loop)

    ThreadPoolExecutor.submit = submitted  # type: ignore[method-assign,assignment]
    asyncio.BaseEventLoop.run_forever = running  # type: ignore[method-assign,assignment]
    threading.setprofile(recorder)
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [
            "agentrl",
            "train",
            str(root / "examples" / "frozen_lake.yaml"),
            *OVERRIDES,
            f"run_dir={folder}/run",
        ]
        sys.setprofile(recorder)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return recorder


def main() -> None:
    """Print the hops."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root.resolve()
    recorder = record(root)
    for name, calls in recorder.found.items():
        print(f"\nto {name}:")
        for file, owner in chain(calls[-1], "\0"):
            print(f"    {Path(file).relative_to(root)} {owner}".rstrip())
    print()
    for half in HALVES:
        for text, left_out in (("", "\0"), (" without those of agentrl/flow", "/agentrl/flow/")):
            hops = hops_of(recorder, half, left_out)
            files = {unit[0] for hop in hops for unit in hop}
            print(f"{half}: {len(hops)} hops in {len(files)} files{text}")
    one_step = recorder.steps[1]
    entered = {code.co_filename for code in one_step}
    print(
        f"{len(one_step)} functions in {len(entered)} files are entered from one batch to the next"
    )


if __name__ == "__main__":
    main()
