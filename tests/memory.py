"""The memory of tensors while a step runs, as torch's allocator counts it."""

import gc
from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(step: Callable[[], object]) -> int:
    """The most that a step takes at once beyond what was there. Its first run, which makes
    gradients and constant tables, is not counted.
    """
    step()
    return max(accumulate(_changes(step)))


def kept_bytes(step: Callable[[], object]) -> int:
    """What a step allocates and does not free."""
    return sum(_changes(step))


def _changes(step: Callable[[], object]) -> list[int]:
    """Bytes of each allocation; negative where memory is freed."""
    gc.collect()  # what other tests have left would be freed in between
    gc.freeze()  # and the next collection need not look through what lives now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        returned = step()
    events = watched.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    del returned  # counted as kept
    return changes
