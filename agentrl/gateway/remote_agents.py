"""`env: agent:remote`: remote agents that pull tasks over HTTP.

    POST /v1/tasks     a task, with the address and the key of its episode; 204: none now
    POST /v1/rewards   its reward, which ends the episode (`done`)
    POST /v1/failures  the agent has failed

A task is leased: an agent that makes no request for `gateway.lease_seconds` has lost it, and the
episode has failed.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from agentrl.errors import EnvError
from agentrl.flow import now
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.program import ProgramAssignment
from agentrl.gateway.session_registry import SessionRegistry


@dataclass(eq=False, slots=True)
class _Offer:
    """A task that waits for an agent. `taken`: one has it."""

    assignment: ProgramAssignment
    taken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False, slots=True)
class RemoteAgents:
    """`AgentProgram` of all agents elsewhere."""

    registry: SessionRegistry
    _offers: deque[_Offer] = field(default_factory=deque)

    async def run(self, assignment: ProgramAssignment) -> AgentOutcome:
        """Wait until an agent has taken the task, and until it has ended."""
        session, offer = self.registry.session(assignment.api_key), _Offer(assignment)
        session.waiting = True
        self._offers.append(offer)
        try:
            await offer.taken.wait()
        finally:
            session.waiting = False
            if offer in self._offers:
                self._offers.remove(offer)
        lease = self.registry.config.lease_seconds
        session.used = now()
        while not session.done.is_set():
            left = lease if session.calls_at_once else session.used + lease - now()
            if left <= 0:
                raise EnvError(
                    f"the agent made no request for {lease:g} s, and lost its task"
                    " (gateway.lease_seconds)"
                )
            try:
                async with asyncio.timeout(left):
                    await session.done.wait()
            except TimeoutError:
                continue
        if session.failure:
            raise EnvError(f"the agent failed: {session.failure}")
        return session.outcome or AgentOutcome()

    def take(self) -> ProgramAssignment | None:
        """Lease the task that has waited longest, if there is one."""
        if not self._offers:
            return None
        offer = self._offers.popleft()
        offer.taken.set()
        return offer.assignment
