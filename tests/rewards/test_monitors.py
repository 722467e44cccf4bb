"""Monitors: progression agrees with the direct semantics, verdicts are final, and calls become
events.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.rewards.ltl import accepts, advance, automaton, parse, state_of
from agentrl.rewards.monitor import Monitor
from agentrl.testing import check_reward
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import Score, ToolCall

Trace = tuple[frozenset[str], ...]
Meaning = Callable[[Trace], bool]


@pytest.mark.parametrize(
    ("formula", "end", "said"),
    [
        ("true", "strong", "holds of every episode"),
        ("pay | !pay", "strong", "holds of every episode"),
        ("F pay | G !pay", "strong", "holds of every episode"),
        ("!(F pay & G !pay)", "strong", "holds of every episode"),
        ("pay & !pay", "strong", "holds of no episode"),
        ("F (pay & !pay)", "weak", "holds of no episode"),
        ("G X true", "strong", "holds of no episode"),
        ("F pay", "weak", "holds of every episode"),
    ],
)
def test_a_formula_that_says_the_same_of_every_episode_is_refused(formula, end, said):
    with pytest.raises(ValidationError, match=f"{said} .*so this part would always say [01]"):
        Monitor.Config(formula=formula, end=end)


def test_a_formula_that_an_episode_can_break_is_taken():
    for formula, end in (
        ("F pay", "strong"),
        ("!pay", "weak"),
        ("N pay", "strong"),
        ("G !pay", "weak"),
    ):
        assert Monitor.Config(formula=formula, end=end).formula == formula
    assert Monitor.Config(formula="F pay", end="weak", pays="progress")  # the nearer, the more


# The direct semantics: what a formula says of a trace, from its definition; of a suffix it says the
# same each time.
def atom(name: str) -> Meaning:
    return lambda w: bool(w) and name in w[0]


def no(f: Meaning) -> Meaning:
    return lambda w: not f(w)


def both(f: Meaning, g: Meaning) -> Meaning:
    return lambda w: f(w) and g(w)


def either(f: Meaning, g: Meaning) -> Meaning:
    return lambda w: f(w) or g(w)


def implies(f: Meaning, g: Meaning) -> Meaning:
    return lambda w: not f(w) or g(w)


def same(f: Meaning, g: Meaning) -> Meaning:
    return lambda w: f(w) == g(w)


def strong_next(f: Meaning) -> Meaning:
    return lambda w: len(w) > 1 and f(w[1:])


def weak_next(f: Meaning) -> Meaning:
    return lambda w: len(w) <= 1 or f(w[1:])


def some(f: Meaning) -> Meaning:
    return cache(lambda w: any(f(w[j:]) for j in range(len(w))))


def always(f: Meaning) -> Meaning:
    return cache(lambda w: all(f(w[j:]) for j in range(len(w))))


def until(f: Meaning, g: Meaning) -> Meaning:
    return cache(lambda w: any(g(w[j:]) and all(f(w[k:]) for k in range(j)) for j in range(len(w))))


def weak_until(f: Meaning, g: Meaning) -> Meaning:
    return either(until(f, g), always(f))


def release(f: Meaning, g: Meaning) -> Meaning:
    return cache(lambda w: all(g(w[j:]) or any(f(w[k:]) for k in range(j)) for j in range(len(w))))


A, B, C = atom("a"), atom("b"), atom("c")
FORMULAS = {
    "a": A,
    "F (a & X F b)": some(both(A, strong_next(some(B)))),
    "G (a -> F b)": always(implies(A, some(B))),
    "!b W a": weak_until(no(B), A),
    "!b U a & G (a -> N !a)": both(until(no(B), A), always(implies(A, weak_next(no(A))))),
    "a R (b | X a)": release(A, either(B, strong_next(A))),
    "G F a <-> F G b": same(always(some(A)), some(always(B))),
    "(a U b) U (a & N N b)": until(until(A, B), both(A, weak_next(weak_next(B)))),
    "!(a U X b) | F G !a": either(no(until(A, strong_next(B))), some(always(no(A)))),
    "X X (a R b) -> F !(a <-> b)": implies(
        strong_next(strong_next(release(A, B))), some(no(same(A, B)))
    ),
    "G (c -> !a U b) & F c": both(always(implies(C, until(no(A), B))), some(C)),
    "F a & F b & (a -> X X !c)": both(
        both(some(A), some(B)), implies(A, strong_next(strong_next(no(C))))
    ),
}


def traces(atoms: str, longest: int) -> Iterator[Trace]:
    letters = [
        frozenset(x for x, there in zip(atoms, bits, strict=True) if there)
        for bits in product((0, 1), repeat=len(atoms))
    ]
    for length in range(longest + 1):
        yield from product(letters, repeat=length)


def assert_agree(text: str, longest: int) -> None:
    meaning, machine, step = FORMULAS[text], automaton(text), cache(advance)
    states = {(): state_of(parse(text))}
    for trace in traces("".join(machine.atoms), longest):
        if trace:
            states[trace] = step(states[trace[:-1]], trace[-1])
        expected = meaning(trace)
        assert accepts(states[trace]) == expected, (text, trace)
        assert machine.accepted(machine.run(trace)) == expected, (text, trace)


@pytest.mark.parametrize("text", FORMULAS)
def test_progression_agrees_with_the_direct_semantics_on_every_short_trace(text):
    assert_agree(text, 3 if "c" in text else 4)


@pytest.mark.long
@pytest.mark.parametrize("text", [text for text in FORMULAS if "c" not in text])
def test_progression_agrees_with_the_direct_semantics_on_every_trace_up_to_eight_events(text):
    assert_agree(text, 8)


@pytest.mark.slow
@pytest.mark.parametrize("text", [text for text in FORMULAS if "c" in text])
def test_progression_agrees_with_the_direct_semantics_over_three_atoms(text):
    assert_agree(text, 5)


letters = st.frozensets(st.sampled_from("abc"))
formulas = st.recursive(
    st.sampled_from(["a", "b", "c", "true", "false"]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("!XNFG"), inner).map(lambda p: f"{p[0]} ({p[1]})"),
        st.tuples(inner, st.sampled_from(["&", "|", "->", "<->", "U", "W", "R"]), inner).map(
            lambda p: f"({p[0]}) {p[1]} ({p[2]})"
        ),
    ),
    max_leaves=4,
)


@given(formulas, st.lists(letters, max_size=5), st.lists(letters, max_size=4))
def test_a_verdict_is_final_and_the_distances_are_exact(text, trace, more):
    machine = automaton(text)
    state = machine.run(trace)
    verdict = machine.verdict(state)
    after = machine.run([*trace, *more])
    if verdict is not None:
        assert machine.accepted(after) is verdict
        assert machine.verdict(after) is verdict
    distance = machine.to_accepted[state]
    assert distance is None or not machine.accepted(after) or len(more) >= distance
    negated = automaton(f"!({text})")
    assert negated.accepted(negated.run(trace)) is not machine.accepted(state)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a -> b -> c", "a -> (b -> c)"),
        ("a U b U c", "a U (b U c)"),
        ("!a U b & c | d", "(((!a) U b) & c) | d"),
        ("G(a)->F(b)", "(G a) -> (F b)"),
        ("XXa", '"XXa"'),
        ('"F" & F "F"', '"F" & (F ("F"))'),
        ('a(n=1, s="x, (y)")', 'a(n=1, s="x, (y)")'),
    ],
)
def test_operators_bind_as_documented(text, same):
    assert parse(text) == parse(same)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a &", "has the end at character 4, where a formula should be"),
        ("a b", "has 'b' at character 3, where an operator or the end should be"),
        ("(a", "where an operator or ) should be"),
        ("a @ b", "has '@' at character 3"),
        ("", "where a formula should be"),
        (" & ".join(f"F a{i}" for i in range(9)), "has 9 atoms, and a monitor may have 8"),
        ("buy(shop)", "arguments that cannot be read"),
        ("buy(shop=[1)", "an argument that cannot be read"),
    ],
)
def test_what_is_no_formula_is_refused_by_the_config_and_says_where(text, said):
    with pytest.raises(ValueError, match=r"monitor|formula|atom") as caught:
        Monitor.Config(formula=text)
    assert said in str(caught.value)


def call(name: str, **arguments: object) -> str:
    return ToolCall(name, arguments).render()


SHOP = [
    call("price", shop="north"),
    call("price", shop="south", n=1),
    "hm",
    call("buy", shop="south", at=0.001, on="2026-11-25"),
    "<tool_call>{",
]
SAID = ["3", "Error: closed", "Call a tool", "bought", "Error: unread"]


@pytest.mark.parametrize(
    ("formula", "holds"),
    [
        ("F buy & (!buy U price)", True),
        ('F buy(shop="south")', True),
        ("F buy(shop=south)", True),
        ('F buy(shop="north")', False),
        ("F price(n=1)", True),
        ("F buy(at=1e-3)", True),
        ("F buy(on=2026-11-25)", True),
        ("F price(n=true)", False),
        ("G !refused", False),
        ("F (refused & price)", True),
        ("F message & F malformed", True),
        ("G (refused -> N (message & N (buy & X malformed)))", True),
        ("X X X X X true", False),
        ("X X X X true", True),
    ],
)
def test_calls_become_events(formula, holds):
    monitor = Monitor(Monitor.Config(formula=formula))
    played = trajectory(SHOP, observations=SAID)
    assert monitor.evaluate(monitor.content(played)).value == float(holds)


def test_progress_counts_the_events_that_are_left():
    monitor = Monitor(
        Monitor.Config(formula="F (look & X F (take & X F leave)) & G !drop", pays="progress")
    )
    names = ["look", "take", "leave"]
    scores = [
        monitor.evaluate(
            monitor.content(trajectory([call(n) for n in names[:k]], observations=["ok"] * k))
        )
        for k in range(4)
    ]
    assert [score.value for score in scores] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [score.parts["violated"] for score in scores] == [1, 1, 1, 0]
    broken = monitor.evaluate(
        monitor.content(trajectory([call("look"), call("drop")], observations=["", ""]))
    )
    assert broken == Score(0.0, {"violated": 1.0, "progress": 0.0})


def test_a_weak_end_forgives_what_is_pending_and_not_what_is_violated():
    def value(formula: str, end: str) -> float:
        monitor = Monitor(Monitor.Config(formula=formula, end=end))
        return monitor.evaluate(
            monitor.content(trajectory([call("a"), call("b")], observations=["", ""]))
        ).value

    assert (value("!d & F c", "strong"), value("!d & F c", "weak")) == (0.0, 1.0)
    assert (value("G !b", "strong"), value("G !b", "weak")) == (0.0, 0.0)


def test_a_monitor_keeps_the_contract_of_a_reward():
    check_reward(
        lambda: Monitor(Monitor.Config(formula="G (price -> F buy)")),
        [trajectory(SHOP, observations=SAID), trajectory([]), trajectory("hello")],
    )
