"""`agentrl doctor`: whether a config can be trained on this machine, and what to mend if not.

`machine.py` asks the machine, `machine_checks.py` judges what it answered; `addresses.py` asks the
reward and tries ports; `trial.py` plays, trains and updates with the config's own parts;
`counting.py` is a task that a sound installation learns in a minute.
"""
