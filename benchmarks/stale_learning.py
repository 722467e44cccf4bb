"""What staleness rules learn in the same time, where the length of an episode says something about
its skill.

    python benchmarks/stale_learning.py                                 # half an hour of one core
    python benchmarks/stale_learning.py --tails heavy --rules mask drop --seeds 2

A policy with free logits plays a problem whose return is known exactly, on the production scheduler
under the virtual clock, and is trained by the code that trains (samples, importance weights, loss).
In `patience`, the longer a policy looks the more its answer is worth; in `haste`, whoever knows the
way is home soon, and the others wander until a limit. Turns take a lognormal time, or one with a
heavy tail (Pareto, shape 1.1); a training step takes 5 s. Each rule gets the same virtual seconds.

`return` is the exact return of the last weights as a share of the best one, mean and range over
seeds; `bias` is what of the true gradient is not along the mean one of so many steps whose
updates are not applied: 0 is unbiased, and the first row says how much of it is noise. `older` is
the share of tokens that carried loss although they were older than the bound, `unused` that of
tokens that carried none.
"""

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from statistics import fmean

import numpy as np
import torch

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Rloo
from agentrl.algorithms.ppo import TurnPpo
from agentrl.algorithms.samples import traced_batch_of
from agentrl.batch import TrainBatch
from agentrl.errors import TrainingError
from agentrl.flow import now, run_virtual
from agentrl.ledger.ledger import Ledger
from agentrl.oracles.estimators import START, Oracle, residual, with_advantages
from agentrl.oracles.problems import Action, Decision, Result, all_decisions
from agentrl.plugins import NoSettings
from agentrl.protocols import ActorCritic, Algorithm, LossTokens
from agentrl.rollout.assignment import Assignment, Report, TurnsPlayed, ignore_reports
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.rollout.scheduler import Rollouts
from agentrl.rollout.seeds import derive_seed
from agentrl.simulate.config import SimulatedEngineConfig
from agentrl.simulate.engine import SimulatedEngine
from agentrl.simulate.world import ReturnReward
from agentrl.tasks.seeded import SeededTasks
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import SEGMENT, Completion, Group, Terminated, Trajectory, Turn

TURNS = 6
BOUND = 4
TRAIN_SECONDS = 5.0
GROUPS, MEMBERS = 4, 4
PATIENCE = Deadlines(reset=1e5, step=1e5, generate=1e5, episode=1e6, group=1e7, stall=5e6)


# The problems


def patience() -> Decision:
    """Each look makes an answer worth more, and takes another turn."""

    def at(looks: int) -> Decision:
        answer = Action("answer", (Result(0.2 + 0.8 * (looks / (TURNS - 1)) ** 2),))
        if looks == TURNS - 1:
            return Decision(f"{looks} looks", (answer, Action("give up", (Result(0.0),))))
        return Decision(f"{looks} looks", (answer, Action("look", (Result(0.0, at(looks + 1)),))))

    return at(0)


def haste() -> Decision:
    """Home is two right turns away; a wrong one leads nowhere, and after five all is over."""

    def at(place: int, left: int) -> Decision:
        def then(goes_on: bool) -> Result:
            if goes_on and place == 1:
                return Result(1.0)
            return Result(0.0, at(place + goes_on, left - 1) if left > 1 else None)

        signs = [Action(name, (then(name == "oak"),)) for name in ("ash", "elm", "oak")]
        return Decision(f"place {place}", tuple(signs))

    return at(0, TURNS - 1)


PROBLEMS = {"patience": patience, "haste": haste}
LEARNING_RATES = {"patience": 1.0, "haste": 0.1}
TAILS: Mapping[str, Callable[[Random], float]] = {
    "moderate": lambda rng: min(rng.lognormvariate(0.0, 1.0), 10.0),
    "heavy": lambda rng: min(rng.paretovariate(1.1), 1000.0),
}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: a staleness rule, its bound, and redundant members."""

    name: str
    rule: str
    bound: int = BOUND
    extra_members: int = 0
    of: str = ""
    """Whose rule it is."""


WAYS = (
    Way("synchronous", "deadline_first", 0),
    Way("deadline_first", "deadline_first"),
    Way("mask", "mask"),
    Way("segment", "segment"),
    Way("drop", "drop", of="verl, prime-rl"),
    Way("gate", "gate", of="AReaL, SkyRL"),
    Way("wait", "wait", of="strict order"),
    Way("drain", "drain", of="updates between batches"),
    Way("drop, redundant", "drop", extra_members=1, of="ROLL Flash"),
)
CRITICS: Mapping[str, Callable[[], Algorithm]] = {
    "none": lambda: Rloo(Rloo.Config(normalizer=float(GROUPS * MEMBERS))),
    "exact": lambda: TurnPpo(
        TurnPpo.Config(normalizer=float(GROUPS * MEMBERS), whiten=False, lam=1.0)
    ),
}


# A run


@dataclass(slots=True)
class TabularPolicy:
    """The logits of a policy, and their version; it plays and is trained."""

    oracle: Oracle
    logits_P: torch.Tensor
    version: int = 0
    probabilities: dict[str, list[float]] = field(init=False)
    """Of the actions of each state."""
    logprobs_W: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.update(self.logits_P)

    def update(self, logits_P: torch.Tensor) -> None:
        """Play with these logits from now on."""
        self.logits_P = logits_P
        parts = torch.split(logits_P, list(self.oracle.sizes.values()))
        self.probabilities = {
            state: torch.softmax(own, 0).tolist()
            for state, own in zip(self.oracle.sizes, parts, strict=True)
        }
        self.logprobs_W = self.oracle.logprobs(logits_P).detach()


@dataclass(frozen=True, slots=True)
class OraclePlayer:
    """`EpisodeRunner` of a policy and a problem, whose turns take drawn times. Each action is one
    token, of the policy at that moment.
    """

    policy: TabularPolicy
    root: Decision
    first_tokens: Mapping[int, int]
    """The token of the first action of each decision, by its identity."""
    ends: Mapping[int, int]
    """The token that says that a part ends before a decision, by its identity."""
    seconds: Callable[[Random], float]

    async def play(
        self, assignment: Assignment, report: Report = ignore_reports
    ) -> tuple[Trajectory]:
        """Play to the end; the time of a turn passes after its action is sampled."""
        rng, started = Random(assignment.seed), now()
        turns: list[Turn] = []
        decision: Decision | None = self.root
        while decision is not None:
            turn, result = self._turn(decision, rng)
            await asyncio.sleep(self.seconds(rng))
            turns.append(turn)
            decision = result.then
            if assignment.reports_turns and decision is not None:
                tail = (START, self.ends[id(decision)])
                part = Trajectory(
                    assignment.id, assignment.task, tuple(turns), SEGMENT, tail_ids=ints(tail)
                )
                report(TurnsPlayed((part,)))
        if assignment.reports_turns:
            report(TurnsPlayed())
        whole = Trajectory(
            assignment.id, assignment.task, tuple(turns), Terminated(), (), now() - started
        )
        return (whole,)

    def _turn(self, decision: Decision, rng: Random) -> tuple[Turn, Result]:
        policy = self.policy
        weights = policy.probabilities[decision.state]
        chosen = rng.choices(range(len(weights)), weights)[0]
        action = decision.actions[chosen]
        result = rng.choices(action.results, [one.probability for one in action.results])[0]
        token = self.first_tokens[id(decision)] + chosen
        completion = Completion(
            ints([token]),
            floats([float(policy.logprobs_W[token])]),
            ints([policy.version]),
            "stop",
        )
        return Turn(ints([START]), completion, result.reward, {}, state=decision.state), result


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run."""

    share: float
    """The exact return of its last weights over the best one."""
    steps: int
    gradient_P: torch.Tensor
    """The mean gradient that was ascended."""
    wanted_P: torch.Tensor
    """The true one of the first weights."""
    older: float
    unused: float


@dataclass(slots=True)
class Run:
    """A run in the virtual time: until `seconds` are over, or, without updates, for `steps`."""

    way: Way
    problem: str
    tail: str
    critic: str
    seed: int
    seconds: float = float("inf")
    steps: int = 1_000_000
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How many were sampled, carried loss, and were older than the bound and did."""

    def outcome(self) -> Outcome:
        """Play and train."""
        return run_virtual(self._main)

    async def _main(self) -> Outcome:
        root = PROBLEMS[self.problem]()
        algorithm = CRITICS[self.critic]()
        oracle = Oracle(root, past_limits=True)
        policy = TabularPolicy(oracle, torch.zeros(sum(oracle.sizes.values())).double())
        first = policy.logits_P
        total_P, step = torch.zeros_like(first), 0
        engine = SimulatedEngine(SimulatedEngineConfig(slots=100_000))
        with Ledger(":memory:") as ledger:
            async with self._rollouts(policy, root, engine, ledger) as rollouts:
                while now() < self.seconds and step < self.steps:
                    groups = await rollouts.next_batch()
                    if now() + TRAIN_SECONDS > self.seconds:
                        break
                    await asyncio.sleep(TRAIN_SECONDS)
                    ascent_P = self._ascent(policy, algorithm, groups, step)
                    total_P += ascent_P
                    async with rollouts.new_weights(step + 1):
                        policy.version = step + 1
                        if self.steps == 1_000_000:
                            policy.update(policy.logits_P + LEARNING_RATES[self.problem] * ascent_P)
                    step += 1
        best, counted = oracle.best_return(), self.tokens
        return Outcome(
            float(oracle.mean_return(policy.logits_P)) / best,
            step,
            total_P / max(1, step),
            oracle.gradient(first),
            counted["older"] / counted["loss"],
            1 - counted["loss"] / counted["batch"],
        )

    def _rollouts(
        self, policy: TabularPolicy, root: Decision, engine: SimulatedEngine, ledger: Ledger
    ) -> Rollouts:
        way, oracle = self.way, policy.oracle
        config = RolloutConfig(
            groups_per_step=GROUPS,
            group_size=MEMBERS,
            extra_members=way.extra_members,
            max_staleness=way.bound,
            staleness_rule=way.rule,
            max_live_episodes=100_000,
            min_live_episodes=100_000,
            deadlines=PATIENCE,
        )
        firsts = {id(one): oracle.first_token(one) for one in all_decisions(root)}
        ends = {id(one): oracle.number(one) + 1 for one in all_decisions(root)}
        runner = OraclePlayer(policy, root, firsts, ends, TAILS[self.tail])
        return Rollouts(
            config,
            tasks=SeededTasks(NoSettings(), "oracle", self.seed),
            runner=runner,
            reward=ReturnReward(),
            engine=engine,
            ledger=ledger,
            seed=derive_seed(self.seed, "rollouts"),
            groups=10_000_000,
        )

    def _ascent(
        self, policy: TabularPolicy, algorithm: Algorithm, groups: list[Group], step: int
    ) -> torch.Tensor:
        """The gradient of a step, shape P."""
        rule = RolloutConfig(staleness_rule=self.way.rule).rule
        oldest = max(0, step - self.way.bound) if rule.masks else 0
        self.tokens["batch"] += sum(
            len(one.new_turns) for group in groups for one in group.trajectories
        )
        try:
            processing = BatchProcessing(BatchProcessingConfig())
            batch = traced_batch_of(groups, algorithm, processing, oldest).batch
        except TrainingError:
            return torch.zeros_like(policy.logits_P)
        oracle = policy.oracle
        if isinstance(algorithm, ActorCritic):
            batch = with_advantages(algorithm, batch, oracle.critic(policy.logits_P))
        self._count(batch, step)
        own_P = policy.logits_P.detach().requires_grad_()
        logprobs_N = oracle.logprobs(own_P)[batch.tokens_S[batch.loss_mask_S].astype(np.int64)]
        rollout_N = torch.from_numpy(batch.rollout_logprobs_N.astype(np.float64))
        tokens = LossTokens(
            logprobs_N.detach(),
            rollout_N,
            rollout_N,
            torch.from_numpy(batch.advantages_N.astype(np.float64)),
            torch.from_numpy(np.repeat(np.arange(batch.num_samples), batch.loss_tokens_M)),
        )
        loss = algorithm.loss(logprobs_N, tokens).loss_N.sum() / algorithm.normalizer(batch)
        (gradient_P,) = torch.autograd.grad(-loss, own_P)
        return gradient_P

    def _count(self, batch: TrainBatch, step: int) -> None:
        versions_N = batch.versions_N
        self.tokens["loss"] += len(versions_N)
        self.tokens["older"] += int((versions_N < step - self.way.bound).sum())


# The table


def runs_of(given: argparse.Namespace) -> list[Run]:
    """All runs, those that apply no updates included (`steps`)."""
    runs = []
    for problem in given.problems:
        for tail in given.tails:
            for critic in given.critics:
                for way in WAYS:
                    if given.rules and way.name not in given.rules:
                        continue
                    if way.rule == "segment" and critic == "none":
                        continue
                    for seed in range(given.seeds):
                        learns = Run(way, problem, tail, critic, seed, given.seconds)
                        runs += [learns, replace(learns, seconds=float("inf"), steps=given.steps)]
    return runs


def outcome_of(run: Run) -> Outcome:
    """Play a run, in a process of its own."""
    torch.set_num_threads(1)
    return run.outcome()


def row_of(runs: Sequence[tuple[Run, Outcome]]) -> str:
    """The row of a way: over seeds, of the runs that learn and of those that do not."""
    way = runs[0][0].way
    learned = [found for run, found in runs if run.seconds < float("inf")]
    frozen = [found for run, found in runs if run.seconds == float("inf")]
    shares = [found.share for found in learned]
    mean_P = torch.stack([found.gradient_P for found in frozen]).mean(0)
    return (
        f"| `{way.name}` | {way.of} | {fmean(shares):.3f} |"
        f" {min(shares):.3f} to {max(shares):.3f} |"
        f" {residual(mean_P, frozen[0].wanted_P):.2f} |"
        f" {fmean(found.steps for found in learned):.0f} |"
        f" {fmean(found.older for found in learned):.1%} |"
        f" {fmean(found.unused for found in learned):.1%} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, and print a table for each problem, tail and critic."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--tails", nargs="+", default=list(TAILS), choices=list(TAILS))
    parser.add_argument("--critics", nargs="+", default=list(CRITICS), choices=list(CRITICS))
    parser.add_argument("--rules", nargs="+", default=[], choices=[way.name for way in WAYS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="Virtual ones of a run.")
    parser.add_argument("--steps", type=int, default=100, help="Of a run without updates.")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args(arguments)
    tables: dict[tuple[str, str, str], dict[str, list[tuple[Run, Outcome]]]] = {}
    runs = runs_of(given)
    with ProcessPoolExecutor(given.processes) as pool:
        for run, found in zip(runs, pool.map(outcome_of, runs), strict=True):
            table = tables.setdefault((run.problem, run.tail, run.critic), {})
            if not table:
                print(
                    f"\n{run.problem}, {run.tail} tail, critic: {run.critic}\n\n"
                    "| rule | whose | return | range | bias | steps | older | unused |\n"
                    f"|{'---|' * 8}"
                )
            rows = table.setdefault(run.way.name, [])
            rows.append((run, found))
            if len(rows) == 2 * given.seeds:
                print(row_of(rows), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
