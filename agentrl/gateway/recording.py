"""A finished episode of a program as a `Trajectory`: the rows of its calls, turn by turn."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from agentrl.gateway.call import AgentAnswer
from agentrl.gateway.call_tree import messages_of
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.session import AgentSession
from agentrl.trajectory import Status, Trajectory, Turn


def trajectory_of(
    session: AgentSession, outcome: AgentOutcome, status: Status, started: float, seconds: float
) -> Trajectory:
    """The seen answers of an episode as turns, row by row; each row but the first begins with a
    fork.

    The reward belongs to the last turn, which is the one that was asked for last. Those of calls
    belong to their turns.
    """
    rows = session.tree.rows()
    turns = [
        _turn(answer, begins=not place, first=not number and not place)
        for number, row in enumerate(rows)
        for place, answer in enumerate(row)
    ]
    if turns:
        last = rows[-1][-1]
        turns[-1] = _turn(
            last,
            begins=len(rows[-1]) == 1,
            first=len(turns) == 1,
            reward=outcome.reward or 0.0,
            info=outcome.info,
        )
    episode = session.episode
    return Trajectory(
        episode.id,
        episode.task,
        tuple(turns),
        status,
        messages_of(rows),
        seconds,
        dropped=dict(session.dropped()),
        started=started,
    )


def _turn(
    answer: AgentAnswer,
    *,
    begins: bool,
    first: bool,
    reward: float = 0.0,
    info: Mapping[str, Any] | None = None,
) -> Turn:
    call = answer.call
    last = call.new_messages[-1] if call.new_messages else None
    shown = "" if last is None else "".join([*(one.digest for one in last.images), last.content])
    return Turn(
        call.prompt_ids if begins else call.new_ids,
        answer.completion,
        answer.reward + reward,
        {"call": answer.id, "call_kind": call.kind, **(info or {})},
        forked=begins and not first,
        generate_seconds=answer.answered - call.asked,
        asked=call.asked,
        state=blake2b(shown.encode(), digest_size=8).hexdigest(),
        images=call.prompt_images if begins else call.new_images,
    )
