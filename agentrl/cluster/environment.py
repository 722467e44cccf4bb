"""Environment variables of workers: how many threads they compute with, and how they allocate
memory on GPUs.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

THREADS = "OMP_NUM_THREADS"
"""The variable that says how many threads torch computes with on CPUs. It is read when torch is
imported."""
ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""The variable with the settings of torch's allocator for GPUs, since torch 2.9. It is read when
torch is imported."""
_ALLOCATORS = (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF")
"""The same, with its older name, which torch still reads."""
_TRAINER_ROLES = ("trainer", "reference", "critic")


def thread_variables(cores: int, processes: int, chosen: str = "") -> dict[str, str]:
    """The variable by which each of the `processes` of a machine computes with its share of the
    cores, and at least one. A number that the user has `chosen` is kept.
    """
    return {THREADS: chosen or str(max(1, cores // max(1, processes)))}


def allocator_variables(
    role: str, environ: Mapping[str, str], chosen: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables of torch's allocator for a trainer's rank: its segments grow, since
    micro-batches of different lengths would leave gaps between them. Settings that the user has
    `chosen`, or that the environment has, are kept.

    None for other roles: the memory of an engine that sleeps is not in such segments.
    """
    if role not in _TRAINER_ROLES:
        return {}
    kept = chosen or chosen_allocator(environ)
    return dict(kept) if kept else {ALLOCATOR: "expandable_segments:True"}


def chosen_allocator(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch's allocator that an environment has."""
    return {name: environ[name] for name in _ALLOCATORS if name in environ}


@contextmanager
def inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started in the block have these environment variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
