"""The substrate: the clock, structured concurrency, bounded edges, deadlines, the staleness rules."""

from agentrl.flow.channel import Channel, ChannelClosedError, ChannelStats
from agentrl.flow.clock import VirtualDeadlockError, VirtualTimeLoop, now, run_virtual
from agentrl.flow.deadline import PendingWait, deadline, waits
from agentrl.flow.event_log import EventLog
from agentrl.flow.finish import to_the_end
from agentrl.flow.flow import Flow
from agentrl.flow.staleness import STALENESS_RULES, StalenessRule, StalenessRuleName, Ticket

__all__ = [
    "STALENESS_RULES",
    "Channel",
    "ChannelClosedError",
    "ChannelStats",
    "EventLog",
    "Flow",
    "PendingWait",
    "StalenessRule",
    "StalenessRuleName",
    "Ticket",
    "VirtualDeadlockError",
    "VirtualTimeLoop",
    "deadline",
    "now",
    "run_virtual",
    "to_the_end",
    "waits",
]
