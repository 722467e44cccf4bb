"""The network on which processes of a run meet: the loopback interface, or one that other machines
reach.
"""

import os
import socket
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
"""The address that only processes of the same machine can reach."""


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
    reached_by = own_address()
    interface = next((name for name, address in _addresses() if address == reached_by), None)
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
            # Connecting a datagram socket only chooses a route, and with it the own address.
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return next((address for _, address in _addresses()), LOOPBACK)
        address: str = probe.getsockname()[0]
        return address


def _addresses() -> Iterator[tuple[str, str]]:
    """The interfaces that are up, but for loopback, each with an IPv4 address of it."""
    import psutil  # a trainer on a machine with nothing but torch does without

    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            is_outer = address.family == socket.AF_INET and not address.address.startswith("127.")
            if is_outer and name in states and states[name].isup:
                yield name, address.address
