"""How many workers are alive, as displays read it."""

from contextlib import ExitStack

from agentrl.cluster.roster import Crew, posted, restart_metrics, roster
from agentrl.observe.meanings import meaning_of


def test_crews_of_one_role_count_as_one_and_leave_with_their_owner() -> None:
    before = roster()
    first, second = Crew("scout", 3, 4, 1), Crew("scout", 2, 2, 5)
    with posted(lambda: Crew("oracle", 1, 1)):
        with posted(lambda: first), posted(lambda: second):
            assert roster() == [*before, Crew("oracle", 1, 1), Crew("scout", 5, 6, 6)]
            first = Crew("scout", 4, 4, 2)
            assert roster()[-1] == Crew("scout", 6, 6, 7)
        assert roster() == [*before, Crew("oracle", 1, 1)]
    assert roster() == before


def test_restarts_and_what_was_set_aside_are_metrics_by_role() -> None:
    crews = [
        Crew("trainer", 1, 1),
        Crew("frozen engine", 1, 2, 3, 1),
        Crew("frozen engine", 1, 1, 2),
    ]
    with ExitStack() as stack:
        for crew in crews:
            stack.enter_context(posted(lambda crew=crew: crew))
        found = restart_metrics()
    expected = {
        "restarts/trainer": 0.0,
        "restarts/frozen_engine": 5.0,
        "set_aside/frozen_engine": 1.0,
    }
    assert expected.items() <= found.items()
    assert "set_aside/trainer" not in found
    assert all(meaning_of(name) for name in found)
