"""A made-up run in the format of real ones, for tests and benchmarks of what reads runs."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import traced_batch_of
from agentrl.ledger.ledger import Ledger
from agentrl.observe.metrics import MetricsFile, rollout_metrics
from agentrl.observe.samples import TrainedBatch, drawn_groups, write_samples
from agentrl.observe.trajectories import write_trajectories
from agentrl.tokens.arrays import floats, ints
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import PlacedImage
from agentrl.trajectory import (
    BranchPoint,
    Completion,
    Failed,
    Group,
    MadeCall,
    Message,
    Score,
    Task,
    Terminated,
    ToolCall,
    Trajectory,
    Truncated,
    Turn,
)

BEGIN = 1_800_000_000.0
"""The Unix time at which a made-up run begins."""
STEP_SECONDS = 10.0


@dataclass(slots=True)
class MadeUpRun:
    """Writes the files of a run into a folder, step by step, without a model.

    In each step, episodes are played and scored for the first 6 of 10 seconds; the trainer has 3,
    and weights take 1. The second turn of each group's first member forks. `texts` are what the
    environment shows, with `images` one by one, `pictures` how it draws its states; tests give
    hostile ones. `untrained`: whether the messages of the failed episode of each step are kept.
    `tools`: names of tools, of which each turn calls one and the last one fails; a call of the
    first takes 0.1 s, of the second 0.2 s, and so on. `branches`: whether the second member of each
    group has left the first one at turn 1.
    """

    folder: Path
    groups: int = 4
    members: int = 4
    turns: int = 3
    tokens: int = 6
    env: str = "made_up"
    texts: Sequence[str] = ("What is next?",)
    pictures: Sequence[str] = ("",)
    images: Sequence[EncodedImage] = ()
    settings: dict[str, object] = field(default_factory=dict)
    untrained: bool = False
    tools: Sequence[str] = ()
    branches: bool = False
    _done: int = 0
    _tasks: int = 0

    def begin(self) -> None:
        """Write what a run writes at its beginning."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings: dict[str, object] = {
            "env": {"name": self.env},
            "seed": 0,
            "steps": 100,
            **self.settings,
        }
        (self.folder / "config.yaml").write_text(json.dumps(settings))  # which is YAML too
        origins = {"env.name": "run.yaml:1", "steps": "command line"}
        (self.folder / "origins.json").write_text(json.dumps(origins))

    def step(self) -> None:
        """Write one more step."""
        step, rng = self._done, random.Random(self._done)
        groups = [self._make_group(step, number, rng) for number in range(self.groups)]
        scored = [
            pair for group in groups for pair in zip(group.trajectories, group.scores, strict=True)
        ]
        write_trajectories(self.folder / "trajectories" / f"step_{step:06d}.parquet", scored)
        processing = BatchProcessing(BatchProcessingConfig())
        traced = traced_batch_of(groups, Grpo(), processing, 0)
        batch, origins = traced.batch, traced.origins
        old_N = batch.rollout_logprobs_N + 0.01
        told_3N = floats(
            np.stack(
                [old_N, old_N + np.linspace(-0.1, 0.1, len(old_N)), np.linspace(0, 2, len(old_N))]
            )
        )
        trained = TrainedBatch(batch, origins, told_3N)
        write_samples(
            self.folder / "samples" / f"step_{step:06d}.parquet",
            step,
            trained,
            drawn_groups(batch, 1, step),
        )
        if self.untrained:
            lost = Task(self.env, step, {}, f"train-{self._tasks + self.groups:06d}")
            failed = replace(
                self._make_trajectory(step, lost, 0, 0.0, rng),
                status=Failed("environment", self.texts[0]),
            )
            path = self.folder / "untrained" / f"step_{step:06d}.parquet"
            write_trajectories(path, [(failed, Score.failed(self.texts[0], "environment"))])
        self._write_ledger(step, groups)
        self._write_timeline(step)
        MetricsFile(self.folder / "metrics.jsonl").append(
            {
                "step": step,
                **rollout_metrics(groups, step),
                **self._scheduler_metrics(step),
                "seconds": STEP_SECONDS,
                "entropy": 1 / (step + 1),
            }
        )
        self._done += 1

    def _scheduler_metrics(self, step: int) -> dict[str, float]:
        """The scheduler's metrics: the trainer waits 6 of the 10 seconds of each step."""
        channel = {"depth": 1.0, "capacity": 4.0, "put_wait": 0.0, "get_wait": 6.0 * (step + 1)}
        slots = float(self.groups * self.members)
        return {
            "live_episodes": slots,
            "live_episodes/limit": 2 * slots,
            "groups/playing": float(self.groups),
            "groups/ready": 0.0,
            "blocked_seconds": 6.0 * (step + 1),
            **{f"channels/groups/{name}": value for name, value in channel.items()},
        }

    def _make_group(self, step: int, number: int, rng: random.Random) -> Group:
        task = Task(self.env, rng.randrange(10**6), {}, f"train-{self._tasks + number:06d}")
        scores = [rng.choice((0.0, 0.5, 1.0)) for _ in range(self.members)]
        members = [
            self._make_trajectory(step, task, member, scores[member], rng)
            for member in range(self.members)
        ]
        ended = BEGIN + STEP_SECONDS * step + 6.0
        return Group(
            task,
            tuple(members),
            tuple(
                # Rewards work on an episode from its end until `ended`.
                Score(
                    score,
                    {"environment": score},
                    scoring_spans=((member.started + member.seconds, ended),),
                )
                for member, score in zip(members, scores, strict=True)
            ),
            step,
        )

    def _make_trajectory(
        self, step: int, task: Task, member: int, score: float, rng: random.Random
    ) -> Trajectory:
        started = BEGIN + STEP_SECONDS * step + rng.random()
        seconds = 5 / self.turns
        turns, messages = [], [Message("system", "Continue.")]
        for number in range(self.turns):
            sampled = [rng.randrange(5, 90) for _ in range(self.tokens)]
            logprobs = floats([-rng.random() for _ in sampled])
            completion = Completion(ints(sampled), logprobs, ints([step] * len(sampled)), "stop")
            last = number == self.turns - 1
            asked = started + number * seconds
            info = {"success": score > 0} if last else {}
            forked = member == 0 and number == 1
            earned = score if last else 0.0
            turns.append(
                Turn(
                    ints([1, 2, 3, 4]),
                    completion,
                    earned,
                    info,
                    forked,
                    0.8 * seconds,
                    0.2 * seconds,
                    asked=asked,
                    picture=self.pictures[number % len(self.pictures)],
                    calls=self._calls_in(number),
                    images=tuple(PlacedImage(1, 2, image) for image in self._images_in(number)),
                )
            )
            messages += [
                Message(
                    "user", self.texts[number % len(self.texts)], images=self._images_in(number)
                ),
                Message("assistant", " ".join(map(str, sampled))),
            ]
        status = Truncated("turns") if rng.random() < 0.1 else Terminated()
        episode = f"{task.id}/{member}/0"
        return Trajectory(
            episode,
            task,
            tuple(turns),
            status,
            tuple(messages),
            5.0,
            started=started,
            picture=self.pictures[-1],
            branch=BranchPoint(f"{task.id}/0/0", 1, 0.5) if self.branches and member == 1 else None,
        )

    def _images_in(self, turn: int) -> tuple[EncodedImage, ...]:
        return (self.images[turn % len(self.images)],) if self.images else ()

    def _calls_in(self, turn: int) -> tuple[MadeCall, ...] | None:
        if not self.tools:
            return None
        place = turn % len(self.tools)
        return (
            MadeCall(
                ToolCall(self.tools[place], {}), place == len(self.tools) - 1, 0.1 * (place + 1)
            ),
        )

    def evaluate(self, scores: Sequence[float | None], name: str = "held_out") -> None:
        """Write an evaluation of the weights after the steps so far: a score for each task, None
        for one that fails.
        """
        step, rng = self._done, random.Random(self._done)
        played = []
        for number, score in enumerate(scores):
            task = Task(
                self.env, number, {}, f"{name}-{number:06d}" + ("" if name == "held_out" else "/0")
            )
            one = replace(
                self._make_trajectory(step, task, 0, score or 0.0, rng),
                id=task.id,
                status=Terminated(),
            )
            if score is None:
                failed = Failed("environment", self.texts[0])
                played.append((replace(one, status=failed), Score(float("nan"), status=failed)))
            else:
                played.append((one, Score(score, {"environment": score})))
        write_trajectories(self.folder / "trajectories" / f"{name}_{step:06d}.parquet", played)
        known = [score for score in scores if score is not None]
        success = sum(score > 0 for score in known) / len(known)
        prefix = "eval" if name == "held_out" else f"eval/{name}"
        row = {f"{prefix}/success": success, f"{prefix}/reward": sum(known) / len(known)}
        MetricsFile(self.folder / "metrics.jsonl").append({"step": step, **row})

    def _write_ledger(self, step: int, groups: Sequence[Group]) -> None:
        """The fates of a step's tasks: all are trained, and one more fails in its environment."""
        with Ledger(self.folder / "ledger.sqlite") as ledger:
            for number, group in enumerate(groups, self._tasks):
                ledger.admit(number, group.task, step)
                for member in range(self.members):
                    ledger.begin(number, member, 0)
            ledger.trained(
                step, {n: list(group.rewards_G) for n, group in enumerate(groups, self._tasks)}
            )
            failed = self._tasks + len(groups)
            ledger.admit(failed, Task(self.env, step, {}, f"train-{failed:06d}"), step)
            ledger.begin(failed, 0, 0)
            ledger.end(failed, 0, 0, "failed", f"environment: {self.texts[0]}")
            ledger.end_task(failed, "failed", "its episodes failed")
        self._tasks += len(groups) + 1

    def _write_timeline(self, step: int) -> None:
        begin = BEGIN + STEP_SECONDS * step
        with (self.folder / "timeline.jsonl").open("a") as file:
            for phase, at in (("rollout", 0.0), ("train", 6.0), ("weights", 9.0), ("record", 10.0)):
                since = datetime.fromtimestamp(begin + at, UTC).isoformat()
                file.write(
                    json.dumps({"pid": 0, "step": step, "phase": phase, "since": since}) + "\n"
                )
        status = {"pid": 0, "step": step, "phase": "record", "since": since}
        (self.folder / "status.json").write_text(json.dumps(status))
