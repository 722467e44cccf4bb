"""The prefix tree of an episode's calls, compared with brute force over random graphs of calls."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import to_samples
from agentrl.flow import Flow, run_virtual
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.wire import assistant
from agentrl.rollout.assignment import Assignment
from agentrl.testing import ScriptedEngine
from agentrl.trajectory import Message, Task, Terminated, ToolCall
from tests.gateway.scripted import RENDERER, abandoned, runner_of, said, user
from tests.properties import examples

CALL = ToolCall("add", {"a": 2, "b": 3}).render()
TEXTS = ("yes", "no", "the summary of all this", "look at 7", CALL, f"I add.\n{CALL}\n{CALL}", "")
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object"}},
}


def tools_of(messages):
    """Those that the program sends with a conversation."""
    return (TOOL,) if messages[0].content == "with tools" else ()


def spoken(messages):
    """What two conversations are compared by."""
    return [
        (m.role, m.said.strip(), [(call.name, dict(call.arguments)) for call in m.tool_calls])
        if m.role == "assistant"
        else (m.role, m.content)
        for m in messages
    ]


class RecordingEngine(ScriptedEngine):
    """Keeps what it has returned: (whole prompt, sampled tokens)."""

    async def generate(self, request):
        completion = await super().generate(request)
        self.returned.append((request.prompt_ids.tolist(), completion.token_ids.tolist()))
        return completion


def recording(rng: random.Random) -> RecordingEngine:
    """Answers with one of a few texts, some of them equal, each after a random time."""
    engine = RecordingEngine.replying(
        lambda request: list(random.Random(request.id).choice(TEXTS).encode()),
        max_context=100_000,
        prefill_seconds=lambda request: rng.uniform(0, 3),
    )
    engine.returned = []
    return engine


class RandomProgram:
    """Calls in every way that programs do: parallel, again, edited, abandoned, summarised, by
    sub-agents, with tools whose calls come back with other ids and results out of order, with
    messages merged or left out.
    """

    def __init__(self, rng: random.Random, steps: int) -> None:
        self.rng = rng
        self.steps = steps
        self.known: list[list[Message]] = []  # conversations that end with an answer

    async def play(self, session) -> AgentOutcome:
        await self._asks(session, [Message("system", "You play."), user("begin")])
        async with Flow("program") as flow:
            for number in range(self.steps):
                flow.start(self._step(session), name=str(number))
                await asyncio.sleep(self.rng.uniform(0, 2))
        return AgentOutcome(1.0)

    async def _step(self, session) -> None:
        conversation = list(self.rng.choice(self.known)) if self.known else [user("begin")]
        said_last = conversation[-1].content
        match self.rng.randrange(11):
            case 0 | 1:
                await self._asks(session, [*conversation, user(self.rng.choice("abc"))])
            case 2:
                await self._asks(session, [user(f"sub-agent {self.rng.randrange(3)}")])
            case 3:
                opening = conversation[:2] if len(conversation) > 2 else conversation[:1]
                await self._asks(session, [*opening, user(f"so far: {said_last}")])
            case 4:
                edited = [
                    Message(m.role, f"{m.content} (edited)") if self.rng.random() < 0.3 else m
                    for m in conversation
                ]
                await self._asks(session, [*edited, user("c")])
            case 5:
                await self._gives_up(session, [*conversation, user("gone")])
            case 6:
                await self._gives_up(session, [*conversation, user("again")])
                await self._asks(session, [*conversation, user("again")])
            case 7:
                await self._asks(session, [user("with tools")])
            case 8:  # two programs, or two threads of one, ask the same at the same time
                async with asyncio.TaskGroup() as group:
                    for _ in range(2):
                        group.create_task(self._asks(session, [*conversation, user("both")]))
            case 9:  # the library asks once more, with the same body or with another
                again = [*conversation, user("sdk")]
                await self._gives_up(session, again)
                await self._asks(
                    session, [*again, *self.rng.choice([[], [user("more")]])], repeated=True
                )
            case 10:
                merged = user("\n".join(m.content for m in conversation if m.role == "user"))
                await self._asks(session, [*(m for m in conversation if m.role != "user"), merged])

    async def _gives_up(self, session, messages) -> None:
        await abandoned(session, messages, self.rng.uniform(0, 2), tools=tools_of(messages))

    async def _asks(self, session, messages, **fields) -> None:
        count = self.rng.choice([1, 1, 1, 2])
        for answer in await said(
            session, messages, count=count, tools=tools_of(messages), **fields
        ):
            self.known.append([*messages, *self._sent_back(answer)])

    def _sent_back(self, answer) -> list[Message]:
        """An answer as programs send it back: stripped or with white space, without its reasoning,
        its calls with ids of their own and arguments in another order; and results of tools, in any
        order.
        """
        space = self.rng.choice(["", " ", "\n"])
        message, calls = answer.message, answer.calls
        if not calls:
            return [Message("assistant", message.content + space)]
        if self.rng.random() < 0.3:
            calls = tuple(replace(call, id=f"own-{self.rng.random()}") for call in calls)
        calls = tuple(
            replace(call, arguments=dict(reversed(call.arguments.items()))) for call in calls
        )
        results = [Message("tool", self.rng.choice("123"), tool_call_id=call.id) for call in calls]
        self.rng.shuffle(results)
        return [assistant(message.said + space, calls), *results]


def played(seed: int, steps: int, kind: type[RandomProgram] = RandomProgram):
    rng = random.Random(seed)
    engine = recording(rng)
    program = kind(rng, steps)
    runner = runner_of(program.play, engine)

    async def main():
        async with engine:
            return await runner.play(Assignment("e", Task("agent", 0), 0))

    (trajectory,) = run_virtual(main)
    return engine, runner.program.sessions[0], trajectory


seeds = st.integers(0, 2**32)


@given(seed=seeds, steps=st.integers(0, 25))
@examples(300)
def test_every_sampled_token_is_in_exactly_one_row_or_dropped_with_a_reason(seed, steps):
    engine, session, trajectory = played(seed, steps)
    assert trajectory.status == Terminated()
    trained: Counter = Counter()
    for sample in to_samples(trajectory, 1.0):
        lost = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.view(np.int8), [0]])))
        for begin, end in zip(lost[::2], lost[1::2], strict=True):
            # An answer that another follows at once has no prompt between them; there is none such.
            trained[
                tuple(sample.token_ids[:begin].tolist()),
                tuple(sample.token_ids[begin:end].tolist()),
            ] += 1
    unseen = Counter(
        (tuple(a.call.prompt_ids.tolist()), tuple(a.completion.token_ids.tolist()))
        for a in session.tree.unseen()
    )
    returned = Counter((tuple(prompt), tuple(answer)) for prompt, answer in engine.returned)
    assert trained + unseen == returned
    answers, tokens = trajectory.dropped.get("unseen", (0, 0))
    assert answers == unseen.total()
    assert tokens == sum(len(answer) * count for (_, answer), count in unseen.items())
    assert trajectory.num_tokens + tokens == sum(len(answer) for _, answer in engine.returned)


class WithTitles(RandomProgram):
    """Asks another model now and then, about any conversation that it has."""

    async def _asks(self, session, messages, **fields) -> None:
        model = self.rng.choice(["policy", "policy", "small"])
        for answer in await said(
            session, messages, tools=tools_of(messages), model=model, **fields
        ):
            self.known.append([*messages, *self._sent_back(answer)])


@given(seed=seeds, steps=st.integers(0, 25))
def test_tokens_of_other_models_are_in_no_row_and_break_none(seed, steps):
    _, session, trajectory = played(seed, steps, WithTitles)
    tree = session.tree
    trained = [answer for row in tree.rows() for answer in row]
    others = tree.of_another_model() if any(call.by_name for call in tree.calls) else []
    assert sorted(answer.id for answer in (*trained, *tree.unseen(), *others)) == sorted(
        a.id for a in tree.answers()
    )
    assert trajectory.dropped.get("other_model", (0, 0))[0] == len(others)
    assert len({answer.call.by_name for answer in trained}) <= 1
    inner = {answer.call.parent for answer in trained} - {None}
    assert len(tree.rows()) == len([answer for answer in trained if answer not in inner])
    # In a session of the engine, each call goes on after the one before.
    last: dict = {}
    for answer in tree.answers():
        assert last.get(answer.thread) in (None, answer.call.parent)
        last[answer.thread] = answer


@given(seed=seeds, steps=st.integers(0, 25))
@examples(300)
def test_the_prefix_tree_is_that_of_brute_force(seed, steps):
    _, session, _ = played(seed, steps)
    conversations: dict = {None: []}
    for call in session.tree.calls:
        messages = [*conversations[call.parent], *call.new_messages]
        said_so_far = spoken(messages)
        candidates = [
            answer
            for answer, before in conversations.items()
            if answer is not None
            and answer.answered <= call.asked
            and said_so_far[: len(before)] == spoken(before)
            and all(role != "assistant" for role, *_ in said_so_far[len(before) :])
        ]
        longest = max((len(conversations[answer]) for answer in candidates), default=0)
        assert (call.parent is not None) == bool(candidates)
        if call.parent is not None:
            assert len(conversations[call.parent]) == longest
        assert call.prompt_ids.tolist() == RENDERER.whole(messages, tools_of(messages)).tolist()
        for answer in call.answers:
            conversations[answer] = [*messages, answer.message]


@given(seed=seeds, steps=st.integers(0, 25))
def test_there_are_as_few_rows_as_the_tree_of_seen_answers_has_ends(seed, steps):
    _, session, trajectory = played(seed, steps)
    seen = [answer for answer in session.tree.answers() if answer.seen]
    inner = {answer.call.parent for answer in seen} - {None}
    assert len(session.tree.rows()) == len([answer for answer in seen if answer not in inner])
    assert sum(turn.forked for turn in trajectory.turns) == len(session.tree.rows()) - 1
    assert sorted(a.id for row in session.tree.rows() for a in row) == sorted(a.id for a in seen)


def kinds(*asked: list[Message]) -> list[str]:
    """The kinds of calls that are asked one after another, each answered with a text of its own."""
    texts = ["I go to the shop", "I buy the bread", "A summary: bread is bought", "done"]
    engine = ScriptedEngine.replying(
        lambda request: list(texts[int(request.id.rpartition("/")[2])].encode()),
        max_context=100_000,
    )

    async def play(session):
        for messages in asked:
            await said(session, messages)
        return AgentOutcome(1.0)

    runner = runner_of(play, engine)

    async def main():
        async with engine:
            await runner.play(Assignment("e", Task("agent", 0), 0))

    run_virtual(main)
    return [call.kind for call in runner.program.sessions[0].tree.calls]


SYSTEM = Message("system", "You shop.")
BEGIN = [SYSTEM, user("buy bread")]
FIRST = [*BEGIN, Message("assistant", "I go to the shop")]
SECOND = [*FIRST, user("you are there"), Message("assistant", "I buy the bread")]


def test_a_call_that_goes_on_is_an_extension_and_a_second_one_from_there_a_branch():
    assert kinds(BEGIN, [*FIRST, user("a")], [*FIRST, user("b")]) == [
        "start",
        "extension",
        "branch",
    ]


def test_the_same_call_for_another_answer_is_a_retry():
    assert kinds(BEGIN, BEGIN) == ["start", "retry"]


def test_another_opening_is_that_of_a_subagent():
    assert kinds(BEGIN, [Message("system", "You search."), user("where is bread?")]) == [
        "start",
        "subagent",
    ]


def test_a_history_that_is_shown_differently_is_an_edit():
    edited = [*BEGIN, Message("assistant", "(left out)"), user("you are there")]
    assert kinds(BEGIN, edited) == ["start", "edit"]


OTHER = Message("system", "You judge.")


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        # Another system message, such as the time.
        (
            [OTHER, *FIRST[1:], user("you are there")],
            "edit",
        ),
        # The oldest turns are left out.
        (
            [SYSTEM, user("you are there"), *SECOND[-1:], user("and now?")],
            "edit",
        ),
        ([*BEGIN, user("and milk")], "edit"),  # without the answer
        ([OTHER, user("Was this right: I go to the shop")], "subagent"),  # a critic
        ([OTHER, user("2 + 2"), Message("assistant", "4"), user("3 + 4")], "subagent"),
        ([SYSTEM, user("So far: I go to the shop")], "compaction"),
    ],
)
def test_a_call_that_goes_on_after_no_answer_is_named_by_what_it_keeps(asked, kind):
    assert kinds(BEGIN, [*FIRST, user("you are there")], asked)[-1] == kind


def test_questions_after_the_same_examples_are_conversations_of_their_own():
    examples = [SYSTEM, user("1 + 1"), Message("assistant", "2")]
    assert kinds([*examples, user("2 + 2")], [*examples, user("3 + 3")]) == ["start", "subagent"]


def test_a_shorter_history_with_a_summary_is_a_compaction():
    summary = [*SECOND, user("summarise")]
    shorter = [SYSTEM, user("buy bread; so far: A summary: bread is bought")]
    asked = kinds(BEGIN, [*FIRST, user("you are there")], summary, shorter)
    assert asked == ["start", "extension", "extension", "compaction"]


def test_an_answer_that_comes_back_without_its_white_space_is_the_same_answer():
    stripped = [*BEGIN, Message("assistant", "  I go to the shop\n"), user("a")]
    assert kinds(BEGIN, stripped) == ["start", "extension"]


def test_requests_of_one_conversation_go_to_one_session_of_the_engine():
    engine = ScriptedEngine.replying(lambda request: list(b"I go to the shop"), max_context=100_000)

    async def play(session):
        await said(session, BEGIN)
        await said(session, [*FIRST, user("a")])
        await said(session, [*FIRST, user("b")])
        return AgentOutcome(1.0)

    async def main():
        async with engine:
            await runner_of(play, engine).play(Assignment("e", Task("agent", 0), 0))

    run_virtual(main)
    first, second, third = engine.requests
    assert first.session == second.session == "e"
    assert second.known == len(first.prompt_ids) + len("I go to the shop") + 1
    assert third.session != "e"
    assert third.known == 0
