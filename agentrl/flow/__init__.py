"""Building blocks of concurrency: clocks, structured tasks, channels, deadlines, retries."""

from agentrl.flow.channel import Channel, ChannelClosedError, ChannelStats
from agentrl.flow.clock import VirtualDeadlockError, VirtualTimeLoop, now, run_virtual
from agentrl.flow.completion import made_in_thread, run_to_completion
from agentrl.flow.deadline import PendingWait, deadline, pause_deadlines, waits
from agentrl.flow.event_log import EventLog
from agentrl.flow.flow import Flow
from agentrl.flow.pausable_clock import PausableClock
from agentrl.flow.periodic import PeriodicThread
from agentrl.flow.proof import has_played, note_played
from agentrl.flow.retries import Retries
from agentrl.flow.spans import Span, SpanLog, record_spans, span
from agentrl.flow.steady_loop import (
    SteadyLoop,
    busy_seconds,
    elapsed,
    expect_long_callback,
    freeze_gc,
    loop_metrics,
    run_steadily,
)
from agentrl.flow.suspicion import Suspect, Suspicion
from agentrl.flow.turnstile import Turnstile
from agentrl.flow.waiting import WaitReason, wait_reasons, waiting_for

__all__ = [
    "Channel",
    "ChannelClosedError",
    "ChannelStats",
    "EventLog",
    "Flow",
    "PausableClock",
    "PendingWait",
    "PeriodicThread",
    "Retries",
    "Span",
    "SpanLog",
    "SteadyLoop",
    "Suspect",
    "Suspicion",
    "Turnstile",
    "VirtualDeadlockError",
    "VirtualTimeLoop",
    "WaitReason",
    "busy_seconds",
    "deadline",
    "elapsed",
    "expect_long_callback",
    "freeze_gc",
    "has_played",
    "loop_metrics",
    "made_in_thread",
    "note_played",
    "now",
    "pause_deadlines",
    "record_spans",
    "run_steadily",
    "run_to_completion",
    "run_virtual",
    "span",
    "wait_reasons",
    "waiting_for",
    "waits",
]
