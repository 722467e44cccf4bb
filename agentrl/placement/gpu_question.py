"""A program that prints what the visible GPUs say of themselves, as a JSON list.

It runs in a process of its own (`agentrl/placement/probe.py`), because asking a GPU makes a CUDA
context, whose memory stays taken as long as the process lives. It imports nothing of agentrl.
"""

import json

import torch


def _facts(number: int) -> dict[str, object]:
    says = torch.cuda.get_device_properties(number)
    prefix = "MIG" if "MIG" in says.name.split() else "GPU"
    return {
        "name": says.name,
        "memory": says.total_memory,
        "capability": [says.major, says.minor],
        "uuid": f"{prefix}-{says.uuid}",
        "multiprocessors": says.multi_processor_count,
        # In kHz. Not all builds of torch tell these.
        "clock": 1e3 * getattr(says, "clock_rate", 0),
        "memory_clock": 1e3 * getattr(says, "memory_clock_rate", 0),
        "bus_bits": getattr(says, "memory_bus_width", 0),
    }


if __name__ == "__main__":
    print(json.dumps([_facts(number) for number in range(torch.cuda.device_count())]))
