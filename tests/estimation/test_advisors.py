"""A reference and a critic beside the trainer: what they say, what is learned, and that runs go on
with them.
"""

import asyncio
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.advantages import whitened
from agentrl.algorithms.archer import Archer
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.losses import k3, reference_penalty, value_loss
from agentrl.algorithms.ppo import Ppo
from agentrl.assembly import PlacedCluster, make_advisors
from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.cluster.processes import start_local
from agentrl.cluster.workers import Make, Worker, WorkerGroup
from agentrl.config import load_config, validate_config
from agentrl.errors import ConfigError, WorkerDiedError
from agentrl.estimation.advisors import Advisors, CriticTraining, explained_variance
from agentrl.estimation.episode_buffer import EpisodeBuffer
from agentrl.protocols import Estimate, LossTokens
from agentrl.testing.trainers import random_samples
from agentrl.trainers.local import LocalTrainer
from agentrl.trajectory import Group, Score, Task, Terminated, Trajectory

ROOT = Path(__file__).parents[2]
LAKE = ROOT / "examples" / "frozen_lake.yaml"
SMALL = [
    "recipe.demonstrations=null",
    "steps=4",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.budget.turns=4",
    "evaluation.tasks=0",
    "checkpoint.every=2",
    "trackers=[]",
]


def sample(mask: list[int], reward: float) -> TrainingSample:
    n = len(mask) + 1
    full = (0, *mask)
    rewards = (*(0.0,) * (n - 1), reward)
    return TrainingSample(
        (1,) * n, full, (0.0,) * n, (0.0,) * n, (0,) * n, (0,) * n, rewards=rewards
    )


def estimated(batch: TrainBatch, values_N: Any, **settings: Any) -> Estimate:
    algorithm = Ppo(Ppo.Config(whiten=False, **settings))
    return algorithm.estimate(batch, values_N, np.zeros(batch.num_samples, np.float32))


def values_for(batch: TrainBatch, rng: np.random.Generator) -> Any:
    return rng.normal(size=batch.num_loss_tokens).astype(np.float32)


masks = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(
    listed=st.lists(st.tuples(masks, st.integers(-3, 3)), min_size=1, max_size=6),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_advantages_are_the_sums_that_the_paper_writes_in_each_sample_alone(listed, lam, seed):
    batch = collate([sample(mask, float(reward)) for mask, reward in listed])
    values_N = values_for(batch, np.random.default_rng(seed))
    got_N = estimated(batch, values_N, lam=lam).advantages_N
    borders = np.cumsum(batch.loss_tokens_M)[:-1]
    by_sample = zip(listed, np.split(values_N, borders), np.split(got_N, borders), strict=True)
    for (_, reward), own_values_N, own_got_N in by_sample:
        values = [*own_values_N.tolist(), 0.0]
        n = len(values) - 1
        deltas = [(reward if t == n - 1 else 0.0) + values[t + 1] - values[t] for t in range(n)]
        expected = [sum(lam**k * deltas[t + k] for k in range(n - t)) for t in range(n)]
        np.testing.assert_allclose(own_got_N, expected, atol=1e-5)


def test_with_lambda_one_an_advantage_is_the_reward_less_what_was_expected():
    batch = collate([sample([1, 0, 1, 1], 2.0), sample([1, 1], -1.0)])
    values_N = values_for(batch, np.random.default_rng(0))
    estimate = estimated(batch, values_N)
    returns_N = np.repeat([2.0, -1.0], batch.loss_tokens_M)
    np.testing.assert_allclose(estimate.advantages_N, returns_N - values_N, atol=1e-6)
    np.testing.assert_allclose(estimate.returns_N, returns_N, atol=1e-6)
    assert explained_variance(estimate.returns_N, estimate.returns_N) == pytest.approx(1)
    assert explained_variance(0 * values_N, estimate.returns_N) == pytest.approx(0)
    white_N = whitened(estimate.advantages_N)
    assert (white_N.mean(), white_N.std()) == (
        pytest.approx(0, abs=1e-6),
        pytest.approx(1, abs=1e-5),
    )


def test_the_penalty_has_the_gradient_of_the_divergence_and_k3_its_value():
    logits = torch.tensor([0.5, -0.3, 0.2, 1.1], dtype=torch.float64, requires_grad=True)
    other = torch.log_softmax(torch.tensor([1.0, 0.2, -0.4, 0.0], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    probabilities = logprobs.exp().detach()
    divergence = (logprobs.exp() * (logprobs - other)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (got,) = torch.autograd.grad((probabilities * reference_penalty(logprobs, other)).sum(), logits)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        (probabilities * k3(logprobs.detach(), other)).sum(), divergence.detach()
    )


def test_a_policy_pays_for_leaving_the_reference_and_nothing_for_being_like_it():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    before, zeros = logprobs.detach(), torch.zeros(2)
    for reference, pays in ((before, False), (before - 0.5, True)):
        tokens = LossTokens(before, before, reference, zeros, zeros)
        output = Grpo(Grpo.Config(kl=0.1)).loss(logprobs, tokens)
        (gradient,) = torch.autograd.grad(output.loss_N.sum(), logprobs)
        assert bool((gradient > 0).all()) is pays
        assert bool((output.metrics["reference_kl"] > 0).all()) is pays
        assert "reference_kl" not in Grpo().loss(logprobs, tokens).metrics


def test_a_value_is_pushed_no_further_than_the_clip():
    values = torch.tensor([0.1, 0.3, 0.3, -0.3], requires_grad=True)
    returns, old = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.zeros(4)
    output = value_loss(values, LossTokens(old, old, old, returns, old), clip=0.2)
    (gradient,) = torch.autograd.grad(output.loss_N.sum(), values)
    assert output.loss_N.tolist() == pytest.approx([0.405, 0.32, 0.045, 0.845])
    assert gradient.tolist() == pytest.approx([-0.9, 0.0, 0.3, -1.3])
    assert output.metrics["value_clipped"].tolist() == [0, 1, 0, 0]
    free = value_loss(values, LossTokens(old, old, old, returns, old), clip=None)
    assert free.loss_N.tolist() == pytest.approx([0.405, 0.245, 0.045, 0.845])


def test_helpers_are_as_the_trainer_where_they_say_nothing_and_are_there_when_they_are_asked_for():
    plain = load_config(LAKE).config
    assert (plain.reference, plain.critic) == (None, None)
    of_trainer = ["trainer=fsdp", "trainer.world_size=2", "trainer.lora={}"]
    own = ["critic.lr=1e-4", "critic.minibatches=1", "reference=local"]
    config = load_config(LAKE, ["algorithm=ppo", "algorithm.kl=0.1", *of_trainer, *own]).config
    assert config.critic
    assert config.reference
    critic, trainer = config.critic.settings.model_dump(), config.trainer.settings.model_dump()
    differing = {key for key in critic if critic[key] != trainer[key]}
    assert (config.critic.name, differing) == ("fsdp", {"lr", "minibatches", "lora"})
    assert (config.reference.name, config.reference.settings.lr) == ("local", 1e-5)
    again = validate_config(json.loads(config.model_dump_json())).config
    assert again == config, "what a run writes down is the run"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["critic.lr=1e-3"],
            (
                r"critic \(command line\): the algorithm 'grpo', as configured, uses none; set"
                r" algorithm"
            ),
        ),
        (
            ["reference=local"],
            "reference .*uses none; set algorithm.kl=0.01, or leave the section out",
        ),
        (["algorithm=ppo", "critic.lrr=1"], "critic.lrr: no such setting.* Did you mean 'lr'"),
        (["algorithm=ppo", "critic.lora={}"], "a critic has no adapters; leave it out"),
        (
            ["algorithm.kl=0.1", "reference=agentrl.testing.trainers:TrainerCase"],
            "has no method `predict`",
        ),
        (
            ["trainer=agentrl.testing.trainers:TrainerCase"],
            (
                r"trainer.name: the trainer .* has no method `predict`, `step`, .*`saved`.*which a"
                r" trainer needs.*agentrl.Trainer"
            ),
        ),
    ],
)
def test_a_wrong_helper_is_refused_with_the_way_out(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config(LAKE, overrides)


def learning(
    model: Path, algorithm: Ppo, minibatches: int = 2, **parts: Any
) -> tuple[LocalTrainer, Advisors]:
    """A trainer, and a reference and a critic beside it."""
    config = LocalTrainer.Config(lr=3e-3, device="cpu", minibatches=minibatches)
    trainer, reference, critic = (
        LocalTrainer(config, model, total_steps=20, role=role, head=head, **parts)
        for role, head in (("trainer", "policy"), ("reference", "policy"), ("critic", "value"))
    )
    return trainer, Advisors(algorithm, reference, critic)


async def learn(
    trainer: LocalTrainer, advisors: Advisors, batches: list[TrainBatch]
) -> list[dict[str, float]]:
    """The metrics of a step on each batch."""
    metrics = []
    for batch in batches:
        advised, advice = await advisors.advise(batch)
        loss, normalizer = advisors.algorithm.loss, advisors.algorithm.normalizer(advised)
        metrics.append({**await trainer.step(advised, loss, normalizer), **advice})
    return metrics


def test_the_critic_learns_what_to_expect_and_the_reference_stays_what_it_was(shallow_model_dir):
    samples = [
        replace(s, rewards=np.eye(len(s.token_ids))[-1])
        for s in random_samples(50, seed=0, count=12)
    ]
    batch = collate(samples)  # all episodes earn 1

    async def main() -> list[Any]:
        # whitened, equal advantages are zeros, and the optimizer would scale up rounding errors
        trainer, advisors = learning(
            shallow_model_dir, Ppo(Ppo.Config(kl=0.01, whiten=False)), minibatches=1
        )
        first, second = advisors.all
        async with trainer, first, second:
            return await learn(trainer, advisors, [batch] * 8)

    steps = asyncio.run(main())
    assert steps[0]["critic/value"] == pytest.approx(0, abs=0.2)
    assert steps[-1]["critic/value"] == pytest.approx(1, abs=0.2)
    assert steps[-1]["critic/loss"] < 0.2 * steps[0]["critic/loss"]
    assert steps[0]["reference_kl"] < 1e-5
    assert steps[-1]["reference_kl"] > 1e-2
    assert not any("logprob_gap" in name for name in steps[0] if name.startswith("critic/"))
    assert all(math.isfinite(value) for step in steps for value in step.values())


def two_turns(right: bool) -> TrainingSample:
    """A first turn that decides: after the answer 7 the second turn earns 1, after the answer 8
    nothing.
    """
    ids = (1, 2, 7 if right else 8, 3, 9)
    return TrainingSample(
        ids,
        (0, 0, 1, 0, 1),
        (0.0,) * 5,
        (0.0,) * 5,
        (-1, -1, 0, -1, 0),
        (0, 0, 0, 1, 1),
        rewards=(0, 0, 0, 0, right),
    )


def test_a_critic_of_turns_learns_from_earlier_episodes_what_an_answer_is_worth(shallow_model_dir):
    def batch(rights: int, count: int = 8) -> TrainBatch:
        return collate([two_turns(number < rights) for number in range(count)])

    algorithm = Archer(Archer.Config(gamma=1.0))
    told: list[int] = []
    replay = EpisodeBuffer(4, 2.0, seed=0, reused=lambda step, task_ids: told.append(step))
    groups = [
        Group(
            Task("env", 0, {}, "t"),
            (Trajectory("t", Task("env", 0), (), Terminated()),),
            (Score(0.0),),
        )
    ]

    async def main() -> Any:
        config = LocalTrainer.Config(lr=3e-3, device="cpu", minibatches=2)
        critic = LocalTrainer(
            config, shallow_model_dir, total_steps=40, role="critic", head="value"
        )
        advisors = Advisors(
            algorithm, None, critic, CriticTraining(updates=2, warmup=2, buffer=replay)
        )
        steps = []
        async with critic:
            for step in range(12):
                steps.append(await advisors.advise(batch(4), step, groups))
        return steps

    steps = asyncio.run(main())
    assert [bool(advised.weights_N.any()) for advised, _ in steps[:4]] == [False, False, True, True]
    assert [metrics["critic/earlier_episodes"] for _, metrics in steps[:4]] == [0, 8, 16, 16]
    assert told == [step for step in range(1, 12) for _ in range(2)]  # in each update
    advised, metrics = steps[-1]
    first_turns = advised.advantages_N.reshape(8, 2)[:, 0]
    second_turns = advised.advantages_N.reshape(8, 2)[:, 1]
    # Half of the answers are right: Q is 1 or 0, V is 0.5. The second turn changes nothing any
    # more.
    assert first_turns.tolist() == pytest.approx([0.5] * 4 + [-0.5] * 4, abs=0.15)
    assert second_turns.tolist() == pytest.approx([0.0] * 8, abs=0.15)
    # What comes of an answer is no value of the state before it.
    assert metrics["critic/explained_variance"] > 0.6
    # Of earlier episodes, only the values of answers.
    assert metrics["critic/loss_tokens"] == 4 * 8 + 2 * 16


def test_a_critic_that_is_updated_more_often_than_the_policy_counts_its_own_steps(
    shallow_model_dir,
):
    config = load_config(LAKE, ["algorithm=archer", "steps=5"]).config
    placed = PlacedCluster(config, config.cluster.make())
    newest = (3, Path("step_000003"))
    advisors = make_advisors(
        placed, Archer(), shallow_model_dir, lambda: newest, CriticTraining(updates=4)
    )
    assert isinstance(advisors.critic, LocalTrainer)
    assert advisors.critic._recovery.latest() == (12, Path("step_000003/critic"))
    assert advisors.critic._spec.total_steps == 20


@pytest.mark.slow
def test_an_advisor_that_dies_is_made_again_as_it_was(shallow_model_dir, tmp_path):
    batches = [collate(random_samples(50, seed=seed)) for seed in range(4)]
    deaths = {"reference": 2, "critic": 5}

    @dataclass
    class Mortal:
        """A worker that dies at the n-th step or prediction of its role, once."""

        worker: Worker
        role: str

        async def call(self, method: str, *args: Any) -> Any:
            if method in ("step", "predict"):
                deaths[self.role] = deaths.get(self.role, 0) - 1
                if deaths[self.role] == 0:
                    raise WorkerDiedError(self.role, 0, "killed")
            return await self.worker.call(method, *args)

        async def check(self) -> None:
            await self.worker.check()

        async def stop(self) -> None:
            await self.worker.stop()

    async def start_mortal(role: str, make: Make, count: int) -> WorkerGroup:
        return WorkerGroup(
            role,
            [Mortal(worker, role) for worker in (await start_local(role, make, count)).workers],
        )

    async def main(start: Any) -> Any:
        trainer, advisors = learning(shallow_model_dir, Ppo(Ppo.Config(kl=0.1)), start=start)
        first, second = advisors.all
        folder = tmp_path / start.__name__
        async with trainer, first, second:
            metrics = await learn(trainer, advisors, batches)
            await trainer.save(folder)
            await advisors.save(folder)
        assert (folder / "critic" / "model.safetensors").is_file()
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in metrics]

    assert asyncio.run(main(start_mortal)) == asyncio.run(main(start_local))
    assert all(left < 0 for role, left in deaths.items() if role != "trainer"), "both have died"


@pytest.mark.long
def test_a_run_with_both_goes_on_as_if_it_had_not_stopped(tmp_path, agentrl):
    (tmp_path / "lengths.py").write_text(
        "def wordy(trajectory):\n    return len(trajectory.messages[-1].content) / 50\n"
    )
    both = [
        "algorithm=ppo",
        "algorithm.kl=0.05",
        "critic.lr=3e-3",
        "rollout.group_size=2",
        "trainer.schedule=constant",
    ]
    sums = []
    for name, stops in (("whole", [4]), ("stopped", [2, 4])):
        for steps in stops:
            done = agentrl(
                "train",
                str(LAKE),
                *SMALL,
                *both,
                "reward=lengths:wordy",
                f"run_dir={tmp_path / name}",
                f"steps={steps}",
                "--resume",
                "auto",
                cwd=tmp_path,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "accelerator" not in done.stdout + done.stderr, (
                "DeepSpeed prints a message in a run without it"
            )
        run = tmp_path / name
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "reward" in row]
        sums.append(
            (
                json.loads((run / "summary.json").read_text())["weights_sha256"],
                [row["critic/loss"] for row in steps],
            )
        )
    assert sums[0] == sums[1]
    assert all(loss > 0 for loss in sums[0][1])
    assert all(row["reference_kl"] >= 0 and row["critic/explained_variance"] <= 1 for row in steps)
    done = agentrl("eval", str(run), "evaluation.tasks=2", "--step", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert agentrl("eval", str(run), "--step", "7").stderr.endswith(
        "no checkpoint '7'; there is 2, 4, latest\n"
    )
    done = agentrl("export", str(tmp_path / "whole"), str(tmp_path / "exported"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "exported" / "critic").exists()
