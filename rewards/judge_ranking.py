"""Scores from pairwise comparisons: pure functions. G is the size of the group."""

from collections.abc import Mapping

_PRIOR_GAMES = 0.1
_MAX_ROUNDS = 200


def meetings(size: int, opponents: int | None = None) -> list[tuple[int, int]]:
    """The pairs of a group to compare: all pairs, or each member with the `opponents` that follow
    it in a ring.

    In a ring each member is in 2 * `opponents` pairs, and the pairs connect the whole group.
    """
    reach = size // 2 if opponents is None else min(opponents, size // 2)
    ring = (
        (member, (member + step) % size) for step in range(1, reach + 1) for member in range(size)
    )
    return sorted({(min(pair), max(pair)) for pair in ring})


def win_shares(points: Mapping[tuple[int, int], float], size: int) -> list[float]:
    """The share of all others that each member beats, or is expected to beat, 0 to 1.

    `points[i, j]` are i's points against j: 1 for a win, 0 for a defeat, 0.5 for a tie. If all
    pairs were compared, the result is the share itself. Otherwise it is the share expected by the
    Bradley-Terry model P(i beats j) = s_i / (s_i + s_j), fitted to the pairs that were compared.
    Fitted to all pairs the model would give the same result: at its maximum likelihood, each
    member's expected wins equal its actual wins (Hunter 2004, "MM algorithms for generalized
    Bradley-Terry models").
    """
    if len(points) == size * (size - 1) // 2:
        won_G = _wins(points, size)
        return [won / (size - 1) for won in won_G]
    strength_G = strengths(points, size)
    return [
        sum(mine / (mine + other) for j, other in enumerate(strength_G) if j != i) / (size - 1)
        for i, mine in enumerate(strength_G)
    ]


def strengths(points: Mapping[tuple[int, int], float], size: int) -> list[float]:
    """The strengths s of the Bradley-Terry model, by the MM algorithm (Hunter 2004, equation 3).

    Each member also plays a tenth of a game against a strength of 1 and wins half of it. So members
    that won or lost every game keep a finite strength above zero.
    """
    won_G = [won + _PRIOR_GAMES / 2 for won in _wins(points, size)]
    strength_G = [1.0] * size
    for _ in range(_MAX_ROUNDS):
        games_G = [_PRIOR_GAMES / (strength + 1.0) for strength in strength_G]
        for i, j in points:
            share = 1.0 / (strength_G[i] + strength_G[j])
            games_G[i] += share
            games_G[j] += share
        strength_G = [won / games for won, games in zip(won_G, games_G, strict=True)]
    return strength_G


def _wins(points: Mapping[tuple[int, int], float], size: int) -> list[float]:
    """The points of each member, over all its games."""
    won_G = [0.0] * size
    for (i, j), of_first in points.items():
        won_G[i] += of_first
        won_G[j] += 1.0 - of_first
    return won_G
