"""Episodes of programs: another way to play one than by an environment, with the same trajectories.

    scheduler ──▶ play(episode) ──▶ program ──calls──▶ session ──▶ policy
                       ▲               │                  │
                       └── trajectory ◀┴──── reward ◀─────┘

What fails in a program is a failure of the environment's layer, unless the engine failed before:
then it is that.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import DeadlineError, EnvError, RewardError, RolloutError
from agentrl.flow import Flow, deadline, elapsed, now
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.program import AgentProgram, ProgramAssignment
from agentrl.gateway.recording import trajectory_of
from agentrl.gateway.session import AgentSession, CallLimits
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.rollout.assignment import Assignment, Report, ignore_reports
from agentrl.rollout.budget import Budget
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.runner import Episode
from agentrl.trajectory import Failed, Status, Terminated, Trajectory, Truncated


@dataclass(frozen=True, slots=True)
class AgentEpisodeRunner:
    """`EpisodeRunner` of a program that calls the policy. The turns of its `budget` are its calls;
    `own_budgets` are those of suites.

    `needs_reward`: the run's reward is what the program earns, so a program that names none has
    failed.
    """

    policy: EnginePolicy
    renderer: TemplateRenderer
    registry: SessionRegistry
    program: AgentProgram
    budget: Budget
    deadline: float
    needs_reward: bool = True
    own_budgets: Mapping[str, Budget] = field(default_factory=dict)

    async def play(
        self, assignment: Assignment, report: Report = ignore_reports
    ) -> Sequence[Trajectory]:
        """See `EpisodeRunner`. Turns are not reported: which calls belong to the conversation is
        known when the program has ended.
        """
        config, started = self.registry.config, elapsed()
        limits = CallLimits(config.max_answers, config.calls_at_once)
        budget = self.own_budgets.get(assignment.task.env, self.budget)
        episode = Episode.of(assignment, budget, report)
        outcome, failure = AgentOutcome(), None
        try:
            async with Flow(f"calls of {episode.id}") as flow:
                session = AgentSession(
                    episode, self.policy, self.renderer, limits, flow, model=config.model
                )
                watching = flow.start(_watch(session, config.idle_seconds), name="idle")
                try:
                    with (
                        deadline("environment", "episode", self.deadline, episode.clock),
                        self.registry.opened(session) as key,
                    ):
                        outcome = await self._run(session, key)
                finally:
                    watching.cancel()
                    flow.cancel()
        except RolloutError as error:
            failure = error
        status = self._final_status(session, outcome, failure)
        if not isinstance(status, Failed):  # whether the program has ended by itself or at a limit
            outcome = outcome.filled_from(session.outcome)
        return (trajectory_of(session, outcome, status, started, elapsed() - started),)

    async def _run(self, session: AgentSession, key: str) -> AgentOutcome:
        """Run the program, and wait for a reward that comes later."""
        # A copy: the group's other members must not see what the program does to its options.
        task = replace(session.episode.task)
        outcome = await self.program.run(ProgramAssignment(task, self.registry.url, key))
        if outcome.reward is not None or session.first_too_long:
            return outcome
        seconds = self.registry.config.reward_seconds
        if seconds and not session.rewarded.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await session.rewarded.wait()
            except TimeoutError:
                raise RewardError(
                    f"no reward came within {seconds:g} s of the program's end"
                    " (gateway.reward_seconds)"
                ) from None
        return outcome

    def _final_status(
        self, session: AgentSession, outcome: AgentOutcome, failure: RolloutError | None
    ) -> Status:
        # A hung program fails by its deadline, whatever its calls met before. Else a refused call
        # or a failed engine is the cause, and what the program raised only its consequence.
        hung = isinstance(failure, DeadlineError)
        if session.refused and not hung:
            if session.first_too_long:
                return Failed(
                    "data",
                    f"the first prompt has {session.first_too_long} tokens and the engine's context"
                    f" holds {session.max_context}: raise engine.max_context",
                )
            return Truncated(session.refused)
        if session.engine_error is not None and failure is not None and not hung:
            failure = session.engine_error
        if failure is not None:
            return Failed.by(failure)
        if not session.tree.rows():
            return Failed(
                "environment",
                "the program ended without an answer of the model: it must call base_url",
            )
        if self.needs_reward and outcome.reward is None and not session.rewarded.is_set():
            return Failed(
                "environment",
                "the program earned no reward: return a number, send one to /v1/rewards, or set"
                " `reward` to one of the run's own",
            )
        return Terminated()


async def _watch(session: AgentSession, seconds: float) -> None:
    """Fail the episode when its program has been idle for `seconds`."""
    while True:
        left = session.used + seconds - now()
        if session.calls_at_once or session.waiting:
            left = seconds
        if left <= 0:
            raise EnvError(f"the program made no call for {seconds:g} s (gateway.idle_seconds)")
        await asyncio.sleep(left)
