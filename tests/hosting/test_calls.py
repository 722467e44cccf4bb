"""The calls that environments make: they reach the turns over every transport, and rewards see them
in any syntax.
"""

import asyncio

import pytest

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.conversation.tools import ToolError
from agentrl.envs.base import ToolEnv, ToolResult
from agentrl.hosting.calls import CALLS, calls_taken
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.hosting.process_env import ProcessEnv
from agentrl.hosting.wrappers import Wrapper
from agentrl.remote.client import RemoteEnv
from agentrl.rewards.monitor import Monitor
from agentrl.rewards.rules.tool_use import ToolUse
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.episode import EnvEpisodeRunner, ScriptedPolicy
from agentrl.testing.rewards import trajectory
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import MadeCall, Message, Score, Task, ToolCall, Trajectory
from tests.remote.served import served

RENDERER = TemplateRenderer(ByteTokenizer())


class Hotel(ToolEnv):
    """Rooms to inspect and to book."""

    def start(self, seed, options):
        self.call_shortly(options["short"])
        self.inspected = False
        return "Find a room."

    def inspect(self, room: str) -> str:
        self.inspected = True
        return f"{room} is fine"

    def book(self, room: str) -> ToolResult:
        if not self.inspected:
            raise ToolError("inspect it first")
        return ToolResult("booked", 1.0, terminated=True)

    def close(self) -> None:
        pass


class AsyncHotel(Hotel):
    async def wait(self, seconds: int) -> str:
        return "waited"


class Deaf(Wrapper):
    """Answers "shh" itself, without a step of the environment."""

    def step(self, action):
        return ("quiet", 0.0, False, False, {}) if action == "shh" else super().step(action)


def played(messages, *, short, factory=Hotel, isolation=None) -> Trajectory:
    left = iter(messages)

    async def main() -> Trajectory:
        host = EnvPool({"env": factory}, EnvDeadlines(), isolation)
        runner = EnvEpisodeRunner(
            ScriptedPolicy(lambda env, rng: next(left), RENDERER),
            RENDERER,
            host,
            Budget(turns=len(messages)),
            60.0,
        )
        (found,) = await runner.play(Assignment("e", Task("env", 3, {"short": short}), 1))
        await host.close()
        return found

    return asyncio.run(main())


def call(name: str, **arguments: object) -> str:
    return ToolCall(name, arguments).render()


ATTIC = ToolCall("book", {"room": "attic"})
SAME = {
    True: ["book attic", "inspect attic", "what now?", "book attic"],
    False: [
        call("book", room="attic"),
        call("inspect", room="attic"),
        "<tool_call>{",
        call("book", room="attic"),
    ],
}


@pytest.mark.parametrize("factory", [Hotel, AsyncHotel])
@pytest.mark.parametrize("short", [True, False])
def test_rewards_see_the_calls_that_the_environment_made_in_whatever_syntax(short, factory):
    said = played(SAME[short], short=short, factory=factory)
    inspected = ToolCall("inspect", {"room": "attic"})
    assert [turn.calls for turn in said.turns] == [
        (MadeCall(ATTIC, True),),
        (MadeCall(inspected),),
        (MadeCall(None),),
        (MadeCall(ATTIC),),
    ]
    assert [CALLS in turn.info for turn in said.turns] == [False] * 4
    tools = ToolUse(ToolUse.Config())
    assert tools.evaluate(tools.content(said)) == Score(
        0.25, {"calls": 4, "malformed": 0.25, "refused": 0.25, "repeated": 0.25}
    )
    for formula, violated in {
        '!book(room="attic") W inspect': 1.0,
        "F inspect": 0.0,
        "G !malformed": 1.0,
    }.items():
        monitor = Monitor(Monitor.Config(formula=formula))
        assert monitor.evaluate(monitor.content(said)).parts["violated"] == violated


@pytest.mark.parametrize("isolation", ["inline", "thread", "process", "remote"])
def test_calls_cross_every_transport(isolation):
    async def main(factory) -> list[object]:
        host = EnvPool(
            {"env": factory},
            EnvDeadlines(),
            isolation if isolation in ("inline", "thread") else None,
        )
        env = host.acquire("env")
        await env.reset(3, {"short": True})
        infos = [(await env.step(said))[-1] for said in SAME[True]]
        await host.release("env", env)
        await host.close()
        return [calls_taken(info) for info in infos]

    with served(Hotel) as server:
        elsewhere = {
            "process": lambda: ProcessEnv(f"{__name__}:Hotel"),
            "remote": lambda: RemoteEnv([server.url]),
        }
        first, *_, last = asyncio.run(main(elsewhere.get(isolation, Hotel)))
    assert first == ([MadeCall(ATTIC, True)], {})
    assert last == ([MadeCall(ATTIC)], {})
    times = [made.seconds for made in (*first[0], *last[0])]
    assert all(seconds is not None and 0 < seconds < 60 for seconds in times)


def test_only_calls_that_ran_are_made_and_a_message_that_a_wrapper_answers_has_none():
    both = call("inspect", room="attic") + call("book", room="attic") + call("book", room="cellar")
    (turn,) = played([both], short=False).turns
    assert [made.call.arguments["room"] for made in turn.calls] == ["attic", "attic"]
    quiet = played(["inspect attic", "shh", "shh"], short=True, factory=lambda: Deaf(Hotel()))
    assert [len(turn.calls) for turn in quiet.turns] == [1, 0, 0]


def test_a_program_that_quotes_a_call_made_none_where_its_environment_says_so():
    said = trajectory(f"I could say {call('book', room='attic')}", calls=[[]])
    monitor = Monitor(Monitor.Config(formula="G !book"))
    assert monitor.evaluate(monitor.content(said)).parts["violated"] == 0.0
    unknown = trajectory(f"I could say {call('book', room='attic')}")
    assert monitor.evaluate(monitor.content(unknown)).parts["violated"] == 1.0


def test_native_calls_of_an_agent_are_matched_with_their_results_by_id():
    calls = (ToolCall("book", {"room": "a"}, "1"), ToolCall("book", {"room": "b"}, "2"))
    said = trajectory("")
    messages = (
        Message("user", "go"),
        Message("assistant", "an example"),
        Message("user", "now"),
        Message("assistant", "\n".join(one.render() for one in calls), tool_calls=calls),
        Message("tool", "done", tool_call_id="2"),
        Message("tool", "Error: full", tool_call_id="1"),
    )
    program = Trajectory(said.id, said.task, said.turns, said.status, messages)
    tools = ToolUse(ToolUse.Config())
    assert tools.evaluate(tools.content(program)).parts == {
        "calls": 2,
        "malformed": 0,
        "refused": 0.5,
        "repeated": 0,
    }
    # Both have a name that is in the other's result, too, if results are told apart by the name of
    # the tool only.
    assert dict(tools.content(program)[-1][0][1].call.arguments) == {"room": "b"}


def test_the_info_of_another_environment_with_such_a_key_stays_as_it_is():
    for value in (3, "abc", [1], [{"name": "x"}], None):
        assert calls_taken({CALLS: value, "x": 1}) == (None, {CALLS: value, "x": 1})
