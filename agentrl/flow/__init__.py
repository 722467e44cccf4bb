"""The substrate: the clock, structured concurrency, bounded edges, the staleness rule."""

from agentrl.flow.channel import Channel, ChannelClosedError, ChannelStats
from agentrl.flow.clock import VirtualDeadlockError, VirtualTimeLoop, now, run_virtual
from agentrl.flow.event_log import EventLog
from agentrl.flow.flow import Flow, deadline
from agentrl.flow.staleness import DeadlineFirst, Ticket

__all__ = [
    "Channel",
    "ChannelClosedError",
    "ChannelStats",
    "DeadlineFirst",
    "EventLog",
    "Flow",
    "Ticket",
    "VirtualDeadlockError",
    "VirtualTimeLoop",
    "deadline",
    "now",
    "run_virtual",
]
