"""How many workers are alive, as displays read it."""

from agentrl.cluster.roster import Crew, posted, roster


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
