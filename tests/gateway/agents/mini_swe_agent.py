"""mini-swe-agent: its command `mini`, on a tiny repository with a defect and a test."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

task = json.loads(os.environ["AGENTRL_TASK"])
a, b = task["seed"] % 7, task["seed"] % 11
repository = Path(tempfile.mkdtemp())
(repository / "adder.py").write_text("def add(a, b):\n    return a - b - 1\n")
(repository / "check.py").write_text(f"from adder import add\n\nassert add({a}, {b}) == {a + b}\n")
author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "Add"]):
    subprocess.run(["git", *command], cwd=repository, check=True)

mini = Path(sys.executable).with_name("mini")
wish = f"add in adder.py is wrong: What is {a} + {b}? check.py must pass"
options = [
    "--model",
    "openai/policy",
    "--task",
    wish,
    "--yolo",
    "--exit-immediately",
    "--output",
    "/dev/null",
]
subprocess.run([mini, *options], cwd=repository, check=True)

passes = subprocess.run([sys.executable, "check.py"], check=False, cwd=repository).returncode == 0
changed = subprocess.run(["git", "diff", "--quiet"], check=False, cwd=repository).returncode == 1
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump(float(passes and changed), file)
