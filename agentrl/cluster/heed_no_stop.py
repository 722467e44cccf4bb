"""Imported by a fork server (`agentrl/cluster/fork_server.py`), which has no other hook: from then
on, it ignores the signals that terminals and schedulers of jobs send to all processes of a run. Its
processes die with it, and the driver ends them itself.
"""

import signal

from agentrl.flow.stop_signals import STOP_SIGNALS

for _number in STOP_SIGNALS:
    signal.signal(_number, signal.SIG_IGN)
