"""The yardsticks. Each run takes a minute or two of one core."""

from collections.abc import Sequence

from benchmarks.yardsticks.yardstick import Order, Yardstick

SMALL = (
    "recipe.demonstrations.episodes=1024",
    "rollout.groups_per_step=8",
    "rollout.group_size=8",
    "steps=16",
    "evaluation.tasks=100",
    "evaluation.every=4",
    "trainer.minibatches=1",
    "trainer.schedule=constant",
)
"""What makes an example fit into the time."""

CRITIC = "critic={lr: 2e-3}"
UNTAUGHT = (
    "The critic begins at random and gets one update a step, sixteen in all, which teach it next to"
    " nothing (the median of `critic/explained_variance` over the steps is at most 0.01 in {}), so"
    " what PPO by turns learns from is mostly noise, and"
)


def _ragen(name: str, config: str, published: str, settings: Sequence[str]) -> Yardstick:
    """PPO and GRPO with and without the filter of groups that hardly vary."""
    return Yardstick(
        name,
        published,
        config,
        {
            "GRPO": ["algorithm.name=grpo"],
            "GRPO, filter": ["algorithm.name=grpo", "batch_processing.keep_variance=0.9"],
            "PPO": ["algorithm.name=ppo", CRITIC],
        },
        [Order("GRPO, filter", "GRPO")],
        [*SMALL, *settings],
        note="PPO has no groups to compare here, so the filter does not apply to it. The filter"
        " leaves out groups that GRPO learns from, too: it trains on two fifths to two thirds of"
        " the tokens that are sampled.",
    )


YARDSTICKS = (
    Yardstick(
        "t_maze",
        "Only a policy that remembers gets beyond one half (Bakker 2002; POMDP T-maze).",
        "t_maze",
        {"full context": [], "last turn only": ["rollout.context={name: last_k, turns: 1}"]},
        [Order("full context", "last turn only")],
        metric="exact/return",
    ),
    Yardstick(
        "kuhn",
        "Baselines by role keep self-play from collapsing (SPIRAL, arXiv:2506.24119); measured by"
        " exploitability, 0 in equilibrium.",
        "kuhn_self_play",
        {"by role": [], "one baseline": ["algorithm.roles=false"]},
        [Order("by role", "one baseline")],
        ["steps=40"],
        metric="exact/exploitability",
        best="low",
        note="In Kuhn poker the first seat loses 1/18 of a chip only, so roles say little.",
    ),
    Yardstick(
        "tic_tac_toe",
        "Self-play goes from no draw against a player that never loses to only draws in 40 steps,"
        " and collapses within 80 to 110 (tinker-cookbook).",
        "kuhn_self_play",
        {"itself alone": ["recipe.latest=1"]},
        settings=[
            "env={name: 'benchmarks.yardsticks.tic_tac_toe:TicTacToe', options: {}}",
            "recipe.demonstrations.player=benchmarks.yardsticks.tic_tac_toe:clumsy_player",
            "recipe.demonstrations.episodes=2048",
            "rollout.budget.turns=9",
            "rollout.group_size=8",
            "steps=100",
            "trainer.lr=3e-4",
            "trainer.schedule=constant",
            "algorithm.entropy_bonus=0.01",
            "evaluation.tasks=20",
            "evaluation.suites=[{name: minimax, tasks: 100, every: 4,"
            " env: 'benchmarks.yardsticks.tic_tac_toe:AgainstMinimax'}]",
        ],
        metric="eval/minimax/success",
        note="At its best, each run does not lose 17 to 26 of 100 games. By the 60th step the"
        " entropy of its moves has fallen from 0.9 to between 0.05 and 0.3 nats, and at some time"
        " 71 to 93 % of the games with itself are drawn: both sides play the same few lines, and"
        " have forgotten what to answer to the other moves of a player that never loses.",
    ),
    Yardstick(
        "guess_number",
        "A discount of 0.9 finds binary search, none does not (GEM, arXiv:2510.01051).",
        "learn/guess_number",
        {
            "gamma 0.9": ["algorithm.gamma=0.9"],
            "gamma 1": ["algorithm.gamma=1"],
        },
        [Order("gamma 0.9", "gamma 1")],
        # With the groups of the others, neither arm learns anything.
        [
            "algorithm.name=reinforce",
            "rollout.budget.turns=4",
            "trainer.schedule=constant",
            "evaluation.tasks=100",
            "evaluation.every=4",
        ],
        metric="eval/turns",
        best="low",
        note="Both arms learn to halve the range, and the discount saves a fiftieth of a guess: of"
        " at most four, most of what a faster win pays is paid by winning at all.",
    ),
    _ragen(
        "frozen_lake",
        "frozen_lake",
        "With 2 % slip the top-p filter lifts PPO from 67.0 to 77.9 and not GRPO (70.9 to 67.9)"
        " (RAGEN-2, arXiv:2604.06268).",
        ["env.options={slippery: 0.02}"],
    ),
    _ragen(
        "frozen_lake_slippery",
        "frozen_lake",
        "The gain of the filter vanishes at 80 % slip (RAGEN-2).",
        ["env.options={slippery: 0.8}"],
    ),
    _ragen(
        "sokoban",
        "learn/sokoban",
        "The filter lifts GRPO from 12.1 to 21.1 and PPO from 12.9 to 28.9 (RAGEN-2).",
        [],
    ),
    Yardstick(
        "long_horizon",
        "GiGPO beats GRPO (86.7 to 72.8 in ALFWorld, arXiv:2505.10978), and so does PPO by turns"
        " (arXiv:2512.17008).",
        "learn/text_maze",
        {
            "GRPO": ["algorithm.name=grpo"],
            "GiGPO": ["algorithm.name=gigpo"],
            "turn PPO": ["algorithm.name=turn_ppo", CRITIC],
        },
        [Order("GiGPO", "GRPO"), Order("turn PPO", "GRPO")],
        SMALL,
        note=f"{UNTAUGHT.format('each run')} all five lose after the fourth step what they had"
        " gained.",
    ),
    Yardstick(
        "maze",
        "A maze whose places have names is learned, one that shows only what is next to the player"
        " is hard for PPO (79.7 and 42.4, LMRL-Gym, arXiv:2311.18232).",
        "learn/text_maze",
        {
            "fully observed": ["env.options={side: 8, cells: 12, brief: true, located: true}"],
            "partly observed": ["env.options={side: 8, cells: 12, brief: true}"],
        },
        [Order("fully observed", "partly observed")],
        [*SMALL, "algorithm.name=turn_ppo", CRITIC],
        note=f"{UNTAUGHT.format('nine of the ten runs')} success falls in both mazes: the order"
        " holds of what is left.",
    ),
)

__all__ = ["YARDSTICKS"]
