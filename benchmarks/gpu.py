"""A battery of checks for a machine with GPUs, and a report of them that can be sent to us.

    make gpu                                     (or, without make: python benchmarks/gpu.py)
    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --only attention trainer-step --into build/gpu
    python benchmarks/gpu.py --device cpu        (what can run on a CPU, with tiny sizes)

It takes torch and transformers (2.11 and 5.17 or later), and what they bring; of what else is
missing, the pieces that need it are skipped by name. Each piece takes less than five minutes, in a
process of its own. The folder gets `report.json`, `report.html` (all in one file) and what pieces
leave, such as a trace of torch.profiler. The exit status is 1 if a piece failed.

A GPU is not needed: then every piece is skipped, and the report says so.
"""

import sys
from pathlib import Path
from pkgutil import resolve_name

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # nothing has to be installed
    sys.exit(resolve_name("benchmarks.battery.command:main")(__doc__))
