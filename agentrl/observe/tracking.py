"""`Tracking`: sends a run's metrics to its trackers, each in a separate thread behind a bounded
queue.

A tracker is third-party code that talks to third-party servers. So none may end a run or delay a
step: an exception becomes one warning, and so does a queue that is full. `metrics.jsonl` has
everything anyway.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, describe
from agentrl.observe.trackers import TrackerSettings
from agentrl.plugins import Component
from agentrl.protocols import EpisodeSample, HowEnded, Tracker, TrackerOffers
from agentrl.trajectory import Message, Score, Trajectory, Unscored, succeeded

QUEUED = 1000
"""Most rows that wait for a tracker; later ones are not sent to it."""
START_SECONDS = 60.0
"""Time for the starts of a run's trackers, which may refuse the config, in seconds."""
END_SECONDS = 60.0
"""Time at the end of a run for the rows that its trackers have not sent yet, in seconds."""
AGAIN_SECONDS = 60.0
"""Between two attempts of a tracker to begin."""
LAST_SECONDS = 5.0
"""Time after that for the call that a tracker is in, in seconds."""
_LONGEST = 20_000
_Work = Callable[[Tracker], None]


class Tracking:
    """The trackers of a run, each with the run's `tags`. Its methods return at once, but for the
    start and the end, which have deadlines.

    `warn` gets a sentence for each tracker that fails, and for each that is too slow; it is called
    by the caller's own thread.

    Raises:
        ConfigError: a tracker is not installed, or cannot begin with its settings.
    """

    def __init__(
        self,
        trackers: Sequence[Component],
        folder: Path,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        *,
        queued: int = QUEUED,
        start_seconds: float = START_SECONDS,
        end_seconds: float = END_SECONDS,
        last_seconds: float = LAST_SECONDS,
        tags: Sequence[str] = (),
        again_seconds: float = AGAIN_SECONDS,
    ) -> None:
        self._warn, self._end_seconds, self._last_seconds = warn, end_seconds, last_seconds
        self._senders = []
        for tracker in trackers:
            settings = tracker.settings
            if isinstance(settings, TrackerSettings):
                settings = settings.tagged(tags)
            make = partial(replace(tracker, settings=settings).call, folder, config)
            self._senders.append(_Sender(tracker.name, make, queued, again_seconds))
        for sender in self._senders:
            sender.await_start(start_seconds)
        refused = [str(sender.refusal) for sender in self._senders if sender.refusal is not None]
        if refused:
            self.end("failed", refused[0])
            raise ConfigError("\n".join(refused))
        self._say()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step, or of an evaluation."""
        row = dict(metrics)
        self._send(lambda tracker: tracker.log(step, row))

    def log_samples(self, name: str, step: int, samples: Sequence[EpisodeSample]) -> None:
        """Send some episodes to the trackers that take them."""

        def work(tracker: Tracker) -> None:
            log = TrackerOffers.of(tracker).log_samples
            if log is not None:
                log(name, step, samples)

        if samples:
            self._send(work)

    def end(self, how: HowEnded, why: str) -> None:
        """Send pending rows, and end. A tracker that needs over `end_seconds` is abandoned."""

        def work(tracker: Tracker) -> None:
            end = TrackerOffers.of(tracker).end
            if end is None:
                tracker.close()
            else:
                end(how, why)

        for sender in self._senders:
            sender.end(work)
        for sender in self._senders:
            sender.await_end(self._end_seconds, self._last_seconds)
        self._say()

    def _send(self, work: _Work) -> None:
        for sender in self._senders:
            sender.send(work)
        self._say()

    def _say(self) -> None:
        for sender in self._senders:
            while sender.complaints:
                self._warn(sender.complaints.popleft())


class _Sender:
    """A tracker, its queue and its thread, in which it is made, used and closed."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], queued: int, again_seconds: float
    ) -> None:
        self.refusal: ConfigError | None = None
        self.complaints = deque[str]()
        self._name, self._make = name, make
        self._queued, self._again_seconds = queued, again_seconds
        self._waiting = deque[_Work]()
        self._changed = threading.Condition()
        self._last: _Work | None = None
        self._tried, self._may_refuse = threading.Event(), True
        self._failed = self._is_slow = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def await_start(self, seconds: float) -> None:
        """Wait until the tracker has begun or failed to."""
        self._may_refuse = self._tried.wait(seconds)
        if not self._may_refuse:
            self.complaints.append(
                f"the tracker {self._name} has not begun after {seconds:.0f} s; the run goes on,"
                " and what it measures waits"
            )

    def send(self, work: _Work) -> None:
        """Queue work for the tracker."""
        with self._changed:
            if len(self._waiting) < self._queued:
                self._waiting.append(work)
                self._changed.notify()
                return
        if not self._is_slow:
            self._is_slow = True
            self.complaints.append(
                f"the tracker {self._name} is too slow: {self._queued:,} rows wait for it, and"
                " while they do, what comes is not sent to it (metrics.jsonl has everything)"
            )

    def end(self, work: _Work) -> None:
        """Queue the tracker's last work."""
        with self._changed:
            self._last = work
            self._changed.notify()

    def await_end(self, seconds: float, last_seconds: float) -> None:
        """Wait until all is done; then drop what still waits, and wait for the rest."""
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return
        with self._changed:
            lost = len(self._waiting)
            self._waiting.clear()
        self.complaints.append(
            f"the tracker {self._name} has not ended after {seconds:.0f} s: {lost:,} rows were not"
            " sent to it (metrics.jsonl has everything)"
        )
        self._thread.join(last_seconds)

    def _run(self) -> None:
        tracker = self._begin_tracker()
        if tracker is None:
            return
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._last is not None)
                work = self._waiting.popleft() if self._waiting else None
            if work is None:
                break
            self._try(work, tracker)
        if self._last is not None:
            self._try(self._last, tracker)

    def _begin_tracker(self) -> Tracker | None:
        """The tracker; None if the run ends before it has begun, or if it refuses its settings."""
        while True:
            try:
                return self._make()
            except ConfigError as error:
                if self._may_refuse and not self._tried.is_set():
                    self.refusal = error
                    return None
                self._complain(error)
            except (Exception, SystemExit) as error:  # of others' code, which must not end the run
                self._complain(error)
            finally:
                self._tried.set()
            with self._changed:
                if self._changed.wait_for(lambda: self._last is not None, self._again_seconds):
                    return None

    def _try(self, work: _Work, tracker: Tracker) -> None:
        try:
            work(tracker)
        except (Exception, SystemExit) as error:  # of others' code, which must not end the run
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            self.complaints.append(
                f"the tracker {self._name} fails: {describe(error)}. The run goes on; the tracker"
                " lacks what it could not take, and metrics.jsonl has everything"
            )


def sample_of(trajectory: Trajectory, score: Score) -> EpisodeSample:
    """An episode as a row of a tracker's table."""
    value = None if isinstance(score.status, Unscored) else float(score.value)
    conversation = "\n\n".join(map(_text_of, trajectory.messages))
    if len(conversation) > _LONGEST:
        half = _LONGEST // 2
        left_out = f"[... {len(conversation) - 2 * half:,} characters are left out ...]"
        conversation = f"{conversation[:half]}\n\n{left_out}\n\n{conversation[-half:]}"
    name = f"{trajectory.id} {trajectory.agent}".rstrip()
    return EpisodeSample(
        name,
        trajectory.task.id,
        str(trajectory.status.name),
        value,
        succeeded(trajectory, score),
        conversation,
    )


def _text_of(message: Message) -> str:
    reasoning = f"<think>{message.reasoning}</think>\n" if message.reasoning else ""
    return f"{message.role}: {reasoning}{message.described}"
