"""Runs a command that reaches nothing by network but one port of its own loopback, which is served
from outside.

    driver -- starts --> `main` -- fork --> first process -- fork --> the command
           <-- a listening socket -- (in new namespaces)

A socket belongs to the network in which it was made. So `main` listens in the new network and sends
the driver the socket, and a server of the driver's answers on it: nothing is forwarded, and there
is nothing else to reach. When the command ends, so does the first process, and the kernel kills all
that is left in its namespace.

This module runs in a process of its own, so it uses only the standard library.
"""

import os
import shlex
import signal
import socket
import sys
from pathlib import Path

import agentrl
from agentrl.sandbox import kernel
from agentrl.sandbox.filter import network_filter

READY = b"ready"
"""The byte string that `main` sends with the socket. Any other text names what the machine
lacks."""
_SPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWIPC
)
_START = (
    "import sys; sys.path.insert(0, {source!r}); from agentrl.sandbox.network import main; del"
    " sys.path[0]; main({channel}, {port}, {command!r})"
)


def contained_command(command: str, channel: int, port: int) -> str:
    """The command of a shell that runs `command` so, with `port` to listen on.

    `channel`: the file descriptor of a connected socket, which it inherits, and over which it sends
    the listening one.
    """
    code = _START.format(
        source=str(Path(agentrl.__file__).parent.parent),
        channel=channel,
        port=port,
        command=command,
    )
    return "exec " + shlex.join([sys.executable, "-I", "-S", "-c", code])


def main(channel: int, port: int, command: str) -> None:
    """Run the command, and exit as it does. What the machine lacks is sent over the channel, and
    nothing is run.
    """
    with socket.socket(fileno=channel) as driver:
        try:
            listener = _enter_network(port)
            first = os.fork()
            if first == 0:
                _enclose()
                socket.send_fds(driver, [READY], [listener.fileno()])
        except Exception as error:
            driver.sendall(f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        listener.close()
    _exit_like(first or _start_command(command))


def _enter_network(port: int) -> socket.socket:
    """Go to a network with nothing but a loopback, and listen there."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(_SPACES)
    kernel.map_to_self(uid, gid)
    return kernel.listen_on_loopback(port)


def _enclose() -> None:
    """In the first process: see no process outside, and give up every right to change this."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.drop_capabilities()
    kernel.install_filter(network_filter())


def _start_command(command: str) -> int:
    """Start the command. It is not process 1, which no signal of its own could end."""
    child = os.fork()
    if child == 0:
        os.execv("/bin/sh", ["sh", "-c", command])
    return child


def _exit_like(child: int) -> None:
    """Reap processes until this one has ended, and exit as a shell does."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
