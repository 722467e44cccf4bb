"""`agentrl doctor`: checks whether a config can be trained on this machine, and says what to fix.

`machine.py` collects facts about the machine, `machine_checks.py` judges them; `addresses.py`
starts the reward and tries ports; `trial.py` plays, trains and updates with the config's own parts;
`counting.py` is a task that a sound installation learns in a minute.
"""
