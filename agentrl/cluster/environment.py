"""Environment variables of workers: how many threads they compute with, how they allocate memory on
GPUs, and which network they meet on.
"""

import os
import socket
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
LOOPBACK = "127.0.0.1"
"""The address that only processes of the same machine can reach."""


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


def stay_on_loopback() -> None:
    """Let gloo and NCCL listen on the loopback interface only, in this process and those that it
    starts.

    By default they use the interface of this machine's name. A choice of the user is kept.
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    _use_interface(loopback)


def meet_other_machines() -> None:
    """Let gloo and NCCL use the interface of `own_address`, in this process and those that it
    starts.

    By default gloo uses the interface of this machine's name, which in many containers, and on
    Debian, is an address that other machines cannot reach. A choice of the user is kept.
    """
    interface = _interface_of(own_address())
    if interface is not None:
        _use_interface(interface)


def _use_interface(name: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    # NCCL takes a bare name for the beginning of several.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def own_address() -> str:
    """How other machines reach this one: the address it would use to talk to the outside, or where
    nothing leads outside, that of its first network. Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return next((address for _, address in _addresses()), LOOPBACK)
        address: str = probe.getsockname()[0]
        return address


def _interface_of(address: str) -> str | None:
    return next((name for name, own in _addresses() if own == address), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """The interfaces that are up, but for loopback, each with an IPv4 address of it."""
    import psutil  # a trainer on a machine with nothing but torch does without

    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            is_outer = address.family == socket.AF_INET and not address.address.startswith("127.")
            if is_outer and name in states and states[name].isup:
                yield name, address.address
