"""Tests at the start of a run that commands reach nothing but the gateway (`gateway.network:
gateway`).
"""

import asyncio
import shlex
import socket
import sys

from agentrl.errors import ConfigError, EnvError
from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.program import ProgramAssignment
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.trajectory import Task

_START_SECONDS = 60.0

# Exits with what is wrong. Its arguments are the ports of the gateway and of another service.
_ATTEMPTS = """
import os, socket, sys

def reaches(family, address):
    try:
        with socket.socket(family) as reaching:
            reaching.settimeout(5)
            return reaching.connect_ex(address) == 0
    except OSError:
        return False

own, other = map(int, sys.argv[1:])
found = []
if not reaches(socket.AF_INET, ("127.0.0.1", own)):
    found.append("the gateway cannot be reached")
if reaches(socket.AF_INET, ("127.0.0.1", other)):
    found.append("another port can be reached")
try:
    socket.socket(socket.AF_UNIX).close()
    found.append("sockets of files can be made")
except OSError:
    pass
sys.exit("; ".join(found) or None)
"""


async def check_containment(registry: SessionRegistry) -> None:
    """Try whether commands are kept from everything but the gateway here. The gateway must be
    served.

    Raises:
        ConfigError: they are not; says what the machine lacks.
    """
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = ProgramAssignment(Task("a check of the network", 0), registry.url, "no-key")
        ports = [str(given.port), str(other.getsockname()[1])]
        trying = CommandAgent(
            shlex.join([sys.executable, "-I", "-S", "-c", _ATTEMPTS, *ports]), contained_by=registry
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await trying.run(given)
        except (EnvError, TimeoutError) as error:
            raise ConfigError(
                "gateway.network=gateway: this machine cannot keep programs from the network:"
                f" {error or f'nothing came within {_START_SECONDS:g} s'}. Allow user namespaces"
                " there (docs/sandbox.md), or write gateway.network=open, which lets programs"
                " reach what you can"
            ) from error
