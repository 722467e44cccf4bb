"""The recipe distill: a teacher's engine scores what the policy sampled, and the policy comes
nearer to it.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.algorithms.distill import Distill
from agentrl.batch import TrainBatch, collate
from agentrl.config import RunConfig, validate_config
from agentrl.engines.local import LocalEngine
from agentrl.engines.router import Router
from agentrl.errors import ConfigError, DeadlineError, EngineDeadError, EngineError
from agentrl.estimation.advisors import Advisors
from agentrl.estimation.teacher import Teacher, TeacherConfig
from agentrl.flow import run_virtual
from agentrl.models.tiny import create_tiny_model
from agentrl.protocols import Env, ScoreRequest, Scores
from agentrl.testing import ScriptedEngine
from agentrl.testing.trainers import random_samples
from agentrl.trainers.local import LocalTrainer
from tests.conftest import Done

RUN = """
env: {name: guess_number, options: {high: 4, max_turns: 2}}
rollout: {groups_per_step: 8, group_size: 4, budget: {turns: 2}, sampling: {max_tokens: 2}}
engine: {device: cpu}
trainer: {device: cpu, lr: 1.0e-3, micro_batch_tokens: 2048}
evaluation: {tasks: 0}
checkpoint: {every: 2}
trackers: []
run_dir: run
steps: 4
"""
DISTILL = "recipe: {name: distill, teacher: {model: teacher}}\nmodel: student\n"


def written(folder: Path, recipe: str) -> Path:
    (folder / "run.yaml").write_text(RUN + recipe)
    return folder


def two_models(folder: Path) -> Path:
    for name, seed in (("student", 0), ("teacher", 1)):
        create_tiny_model(
            folder / name, corpus=["Guess a number from 1 to 4. higher lower right"], seed=seed
        )
    return folder


def weights_of(folder: Path) -> str:
    found: str = json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"]
    return found


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in rows if "reference_kl" in row]


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"))


def divergence(student: Path, teacher: Path) -> float:
    """KL(student || teacher) of the next token, over the whole vocabulary: the mean of all prompts
    of the game.
    """
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    opening = [
        {"role": "system", "content": "Guess the secret number. Answer with one number."},
        {"role": "user", "content": "Guess a number from 1 to 4."},
    ]
    hints = [
        [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
        for guess, hint in product("1234", ("higher", "lower"))
        if (guess, hint) not in (("1", "lower"), ("4", "higher"))
    ]
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (student, teacher)
    ]
    found = []
    for messages in (opening, *([*opening, *hint] for hint in hints)):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        with torch.inference_mode():
            p_V, q_V = (model(ids).logits[0, -1].double().log_softmax(0) for model in models)
        found.append(float((p_V.exp() * (p_V - q_V)).sum()))
    return float(np.mean(found))


def any_digit(env: Env, rng: Random) -> str:
    """A player for a beginner, who does not know that the number is 4 at most."""
    return str(rng.randint(1, 9))


def imitating(player: str) -> str:
    return (
        f"demonstrations: {{player: '{player}', episodes: 128, episodes_per_step: 8, lr: 2.0e-3}}"
    )


@pytest.mark.long
def test_a_policy_comes_nearer_to_its_teacher(tmp_path: Path, agentrl: Callable[..., Done]) -> None:
    recipe = f"{{name: sft, {imitating('agentrl.envs.guess_number:weak_player')}}}"
    done = agentrl(
        "train",
        "run.yaml",
        "run_dir=teaching",
        cwd=written(tmp_path, f"recipe: {recipe}\nmodel: tiny\n"),
    )
    assert done.returncode == 0, done.stderr
    student, teacher = tmp_path / "teaching" / "model", tmp_path / "teaching" / "demonstrations"
    recipe = (
        f"{{name: distill, teacher: {{model: {teacher}}}, {imitating(f'{__name__}:any_digit')}}}"
    )
    written(tmp_path, f"recipe: {recipe}\nmodel: {student}\n")
    done = agentrl("train", "run.yaml", "steps=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before = divergence(tmp_path / "run" / "demonstrations", teacher)
    after = divergence(newest_checkpoint(tmp_path / "run"), teacher)
    assert before > 1
    assert after < 0.25 * before, (before, after)


@pytest.mark.slow
@pytest.mark.long
def test_a_policy_learns_from_an_earlier_self_and_a_run_that_goes_on_has_the_same_one(
    tmp_path: Path, agentrl: Callable[..., Done]
) -> None:
    """With the reward alone to learn from, the policy leaves the teacher, who follows at every
    second version.
    """
    two_models(tmp_path)
    settings = "{name: distill, reward_weight: 1.0, teacher: {refresh: 2}}"
    written(tmp_path, f"recipe: {settings}\nmodel: student\n")
    done = agentrl("train", "run.yaml", "recipe.normalizer=1.0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole = weights_of(tmp_path)
    apart = [row["reference_kl"] for row in rows_of(tmp_path)]
    assert [kl > 1e-6 for kl in apart] == [False, True, False, True]
    done = agentrl("train", "--resume", "run", "--step", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights_of(tmp_path) == whole
    np.testing.assert_allclose([row["reference_kl"] for row in rows_of(tmp_path)], apart, rtol=1e-5)


class MortalEngine(LocalEngine):
    """Its first instance to score dies at its third request; `deaths` of them may."""

    deaths = 0
    made = 0

    def __init__(self, config: LocalEngine.Config, model: Path) -> None:
        super().__init__(config, model)
        type(self).made += 1
        self.asked = 0

    async def score(self, request: ScoreRequest) -> Scores:
        self.asked += 1
        if self.asked == 3 and type(self).deaths > 0:
            type(self).deaths -= 1
            raise self._die(RuntimeError("out of memory"))
        return await super().score(request)


@pytest.mark.slow
@pytest.mark.long
def test_a_teacher_s_engine_that_dies_is_restarted_and_changes_nothing(
    tmp_path: Path, agentrl: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(two_models(tmp_path), DISTILL)
    found = []
    for deaths in (0, 1):
        monkeypatch.setattr(MortalEngine, "deaths", deaths)
        monkeypatch.setattr(MortalEngine, "made", 0)
        engine = f"recipe.teacher.engine={__name__}:MortalEngine"
        done = agentrl("train", "run.yaml", "steps=2", f"run_dir=run{deaths}", engine, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (MortalEngine.made, MortalEngine.deaths) == (1 + deaths, 0)
        found.append(
            json.loads((tmp_path / f"run{deaths}" / "summary.json").read_text())["weights_sha256"]
        )
    assert found[0] == found[1]


class OneByOne:
    """Scores a token by its own number, and counts how many requests there are at once."""

    def __init__(self) -> None:
        self.now = self.most = self.version = 0
        self.requests: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> Scores:
        self.requests.append(request)
        self.now += 1
        self.most = max(self.most, self.now)
        # They do not end in the order in which they began.
        await asyncio.sleep(1 + len(self.requests) % 3)
        self.now -= 1
        return Scores(request.token_ids[request.start :].astype(np.float32), self.version)


def asked(engine: Any, batch: TrainBatch, **settings: Any) -> Any:
    teacher = Teacher(engine, **{"temperature": 1.0, "seconds": 60.0, "concurrency": 3, **settings})
    return teacher.logprobs(batch)


def test_only_so_many_samples_are_scored_at_once_and_each_loss_token_gets_its_own_logprob() -> None:
    batch, engine = collate(random_samples(500, seed=1, count=20)), OneByOne()
    logprobs_N = run_virtual(lambda: asked(engine, batch, temperature=0.7))
    assert logprobs_N.tolist() == batch.tokens_S[batch.loss_mask_S].tolist()
    assert engine.most == 3
    assert len(engine.requests) == int((batch.loss_tokens_M > 0).sum())
    assert {request.temperature for request in engine.requests} == {0.7}
    assert len({request.id for request in engine.requests}) == len(engine.requests)


def test_what_goes_wrong_with_a_teacher_ends_the_step_with_its_reason() -> None:
    batch = collate(random_samples(500, seed=1, count=20))
    with pytest.raises(
        DeadlineError, match=r"score did not answer .* 0\.5 s \(rollout\.deadlines\.score"
    ):
        run_virtual(lambda: asked(OneByOne(), batch, seconds=0.5))

    class Changing(OneByOne):
        async def score(self, request: ScoreRequest) -> Scores:
            self.version = len(self.requests) // 10
            return await super().score(request)

    with pytest.raises(EngineError, match=r"several versions within one batch: \[0, 1\]"):
        run_virtual(lambda: asked(Changing(), batch))

    class Doomed(ScriptedEngine):
        async def score(self, request: ScoreRequest) -> Scores:
            raise EngineDeadError("out of memory")

    class Unstartable(ScriptedEngine):
        async def __aenter__(self) -> "Unstartable":
            raise EngineError("no device")

    async def main() -> None:
        async with Router(
            [Doomed(lambda tokens: [1.0])], factory=lambda n: Unstartable(lambda tokens: [1.0])
        ) as router:
            await asked(router, batch)

    with pytest.raises(
        EngineDeadError, match=r"engine 0 could not be restarted: no device \(3 times in a row\)"
    ):
        run_virtual(main)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_a_teacher_s_engine_and_a_trainer_give_the_same_advantages(
    tmp_path: Path, tiny_model_dir: Path, temperature: float
) -> None:
    """Of samples of several turns, some of which go on with a trajectory that forked."""
    samples = [replace(sample, support=None) for sample in random_samples(300, seed=3, count=12)]
    batch = collate(
        replace(sample, continues=number % 3 == 1) for number, sample in enumerate(samples)
    )
    algorithm = Distill(Distill.Config(normalizer=1.0))

    async def main() -> tuple[TrainBatch, TrainBatch]:
        async with (
            LocalTrainer(
                LocalTrainer.Config(device="cpu"),
                tiny_model_dir,
                total_steps=1,
                temperature=temperature,
            ) as trainer,
            Router([LocalEngine(LocalEngine.Config(device="cpu"), tiny_model_dir)]) as router,
        ):
            teacher = Teacher(router, temperature=temperature, seconds=60, concurrency=5)
            by_engine = Advisors(algorithm, teacher=teacher)
            taught, _ = await by_engine.advise(await by_engine.ask_teacher(batch))
            computed, _ = await Advisors(algorithm, reference=trainer).advise(batch)
            return taught, computed

    taught, computed = asyncio.run(main())
    np.testing.assert_allclose(taught.advantages_N, computed.advantages_N, rtol=0, atol=1e-3)
    assert np.abs(computed.advantages_N - batch.advantages_N).max() > 0.1


def config_of(**sections: Any) -> RunConfig:
    recipe = {"name": "distill", **sections.pop("recipe", {})}
    return validate_config({"env": {"name": "guess_number"}, "recipe": recipe, **sections}).config


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"recipe": {"teacher": {"engine": {"name": "openai", "url": "http://127.0.0.1:1"}}}},
            (
                "engine 'openai' has no method `score`.*engine=local or engine=vllm, or train with"
                " algorithm=distill"
            ),
        ),
        (
            {
                "recipe": {"teacher": {"engine": "vllm"}},
                "rollout": {"sampling": {"temperature": 0.7}},
            },
            (
                r"engine 'vllm' scores tokens at temperature 1 only, and"
                r" rollout\.sampling\.temperature is 0\.7"
            ),
        ),
        ({"recipe": {"teacher": {"engine": {"max_bach": 4}}}}, "max_batch"),
        ({"rollout": {"sampling": {"top_p": 0.9}}}, "rollout.sampling leaves tokens out"),
        (
            {"recipe": {"reward_weight": 0.5}, "rollout": {"group_size": 1}},
            "compares the members of a group",
        ),
        (
            {"recipe": {"teacher": {"refresh": 3}}, "checkpoint": {"every": 10}},
            r"refresh \(3\) must divide",
        ),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_anything_starts(
    sections: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**sections)


def test_a_teacher_that_follows_the_policy_has_its_model() -> None:
    with pytest.raises(ValueError, match="leave out model"):
        TeacherConfig(model=Path("other"), refresh=2)


def test_the_section_algorithm_is_not_asked_about_a_recipe_with_its_own() -> None:
    """Not whether it could compare the members of a group of one, nor which helpers it needs."""
    config = config_of(rollout={"group_size": 1}, algorithm={"name": "grpo", "kl": 0.1})
    assert config.reference is None
    # Though ppo has a critic.
    with pytest.raises(ConfigError, match="the recipe 'distill', as configured, asks none"):
        config_of(rollout={"staleness_rule": "segment"}, algorithm={"name": "ppo"})


def test_a_teacher_with_other_tokens_is_refused_before_anything_starts(
    tmp_path: Path, agentrl: Callable[..., Done]
) -> None:
    create_tiny_model(tmp_path / "student", corpus=["Guess a number"] * 9)
    create_tiny_model(tmp_path / "teacher", corpus=["up and down the hill"] * 9)
    done = agentrl("train", "run.yaml", cwd=written(tmp_path, DISTILL))
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "recipe.teacher.model: the tokenizer of teacher differs from that of student in" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "trajectories").exists()


def test_a_teacher_for_shorter_conversations_is_refused(
    tmp_path: Path, agentrl: Callable[..., Done]
) -> None:
    written(two_models(tmp_path), DISTILL)
    done = agentrl("train", "run.yaml", "recipe.teacher.engine.max_context=64", cwd=tmp_path)
    assert done.returncode != 0
    assert "the teacher's engine takes at most 64 tokens, and the policy's 2048" in " ".join(
        done.stderr.split()
    )


def test_a_sample_that_the_teacher_s_engines_die_of_carries_no_loss_and_the_others_are_taught() -> (
    None
):
    batch = collate(random_samples(500, seed=1, count=20))
    first = next(number for number, count in enumerate(batch.loss_tokens_M) if count)
    lethal = batch.split([1] * batch.num_samples)[first]
    asked_tokens = lethal.tokens_S[: int(np.flatnonzero(lethal.loss_mask_S)[-1]) + 1].tolist()

    class Mortal(ScriptedEngine):
        async def score(self, request: ScoreRequest) -> Scores:
            if request.token_ids.tolist() == asked_tokens:
                await self.__aexit__()
                raise EngineDeadError("out of memory")
            return Scores(request.token_ids[request.start :].astype(np.float32), 0)

    restarted: list[int] = []

    def again(number: int) -> Mortal:
        restarted.append(number)
        return Mortal(lambda tokens: [1.0])

    async def main() -> TrainBatch:
        async with Router([Mortal(lambda tokens: [1.0])], factory=again) as router:
            teacher = Teacher(router, temperature=1.0, seconds=60, concurrency=3)
            return await Advisors(Distill(Distill.Config()), teacher=teacher).ask_teacher(batch)

    taught = run_virtual(main)
    assert 2 <= len(restarted) <= 4
    assert taught.num_loss_tokens == batch.num_loss_tokens - int(lethal.loss_mask_S.sum())
    assert taught.reference_logprobs_N.tolist() == taught.tokens_S[taught.loss_mask_S].tolist()


def test_a_teacher_that_answers_nan_ends_the_step() -> None:
    class Broken(OneByOne):
        async def score(self, request: ScoreRequest) -> Scores:
            scores = await super().score(request)
            return replace(scores, logprobs=scores.logprobs * np.float32("nan"))

    with pytest.raises(EngineError, match="says NaN"):
        run_virtual(lambda: asked(Broken(), collate(random_samples(500, seed=1, count=4))))
