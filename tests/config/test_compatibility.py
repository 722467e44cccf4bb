"""Each rule of the table between settings, with a config that breaks it and one that does not."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.config import compatibility, load_config
from agentrl.config.compatibility import ConfiguredRun, check_stage
from agentrl.engines.local import LocalEngine
from agentrl.errors import ConfigError
from agentrl.protocols import EngineOffers
from agentrl.settings.base import Settings
from agentrl.trajectory import Score, Trajectory


class Ranked:
    """A reward that compares the members of a group."""

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        return [Score(float(place)) for place, _ in enumerate(trajectories)]


class Row(NamedTuple):
    rule: str
    breaks: str
    """Overrides, with spaces between them."""
    keeps: str
    message: str


ROWS = [
    Row(
        "archer_has_a_critic_of_answers",
        "recipe=archer",
        "recipe=archer algorithm=archer",
        (
            "recipe=archer teaches a critic what answers are worth, and algorithm=grpo has "
            "none: set algorithm=archer, or recipe=policy_gradient"
        ),
    ),
    Row(
        "archer_trains_on_whole_episodes",
        "recipe=archer algorithm=archer rollout.staleness_rule=segment",
        "recipe=archer algorithm=archer",
        (
            "rollout.staleness_rule=segment trains on parts of episodes, and recipe=archer "
            "uses tasks again only when they have been trained on whole: choose another "
            "staleness_rule, or recipe=policy_gradient"
        ),
    ),
    Row(
        "archer_warms_up_before_the_end",
        "recipe=archer algorithm=archer recipe.critic_warmup=5 steps=5",
        "recipe=archer algorithm=archer recipe.critic_warmup=5 steps=6",
        (
            "recipe.critic_warmup is 5, and the run has 5 steps, so the policy would never "
            "learn: lower it, or raise steps"
        ),
    ),
    Row(
        "teacher_can_score",
        (
            "recipe=distill recipe.teacher.engine.name=openai "
            "recipe.teacher.engine.url=http://localhost:8000"
        ),
        "recipe=distill",
        (
            "recipe.teacher.engine.name: engine 'openai' has no method `score`, so it cannot "
            "say how likely given tokens are: serve the teacher with engine=local or "
            "engine=vllm, or train with algorithm=distill, whose teacher a trainer computes"
        ),
    ),
    Row(
        "teacher_scores_at_the_temperature",
        "recipe=distill recipe.teacher.engine=vllm rollout.sampling.temperature=0.7",
        "recipe=distill recipe.teacher.engine=vllm",
        (
            "recipe.teacher.engine.name: engine 'vllm' scores tokens at temperature 1 only, "
            "and rollout.sampling.temperature is 0.7: set it to 1, or serve the teacher with "
            "engine=local"
        ),
    ),
    Row(
        "teacher_compares_the_whole_vocabulary",
        "recipe=distill rollout.sampling.top_p=0.9",
        "recipe=distill",
        (
            "rollout.sampling leaves tokens out (top_p, top_k or min_p), and an engine scores"
            " tokens over the whole vocabulary, so teacher and policy could not be compared: "
            "leave them out, or write recipe=policy_gradient algorithm=distill, whose teacher"
            " is computed over the same tokens"
        ),
    ),
    Row(
        "distill_compares_several_members",
        "recipe=distill recipe.reward_weight=0.5 rollout.group_size=1",
        "recipe=distill recipe.reward_weight=0.5",
        (
            "recipe.reward_weight compares the members of a group, and rollout.group_size is "
            "1: set it to 2 or more, or leave reward_weight out"
        ),
    ),
    Row(
        "teacher_is_the_same_after_a_resume",
        "recipe=distill recipe.teacher.refresh=3",
        "recipe=distill recipe.teacher.refresh=5",
        (
            "recipe.teacher.refresh (3) must divide checkpoint.every (10), or a resumed run "
            "would have another teacher than an uninterrupted one"
        ),
    ),
    Row(
        "pairs_are_weighed_once_a_step",
        "recipe=iterative_dpo trainer.minibatches=2",
        "recipe=iterative_dpo",
        (
            "trainer.minibatches is above 1, and recipe=iterative_dpo weighs pairs before "
            "each update: leave it out, and set pairs_per_step in the section `recipe`"
        ),
    ),
    Row(
        "iterative_dpo_has_pairs",
        "recipe=iterative_dpo rollout.group_size=1",
        "recipe=iterative_dpo",
        (
            "rollout.group_size is 1, and recipe=iterative_dpo compares the members of a "
            "group: there would be no pairs. Set rollout.group_size to 2 or more (8 is usual)"
        ),
    ),
    Row(
        "iterative_dpo_plays_with_the_newest_model",
        "recipe=iterative_dpo rollout.max_staleness=1",
        "recipe=iterative_dpo",
        (
            "rollout.max_staleness is 1, and recipe=iterative_dpo plays each iteration with "
            "the model that the last one has trained: write rollout.max_staleness=0"
        ),
    ),
    Row(
        "iterative_dpo_compares_whole_episodes",
        "recipe=iterative_dpo rollout.staleness_rule=segment",
        "recipe=iterative_dpo rollout.staleness_rule=drop",
        (
            "rollout.staleness_rule=segment trains on parts of episodes, and "
            "recipe=iterative_dpo compares whole ones: choose another rule"
        ),
    ),
    Row(
        "iterative_dpo_has_no_advantages",
        "recipe=iterative_dpo batch_processing.normalize=batch",
        "recipe=iterative_dpo",
        (
            "batch_processing.normalize=batch normalises advantages, and recipe=iterative_dpo"
            " has none, but pairs: leave it out"
        ),
    ),
    Row(
        "self_play_has_one_environment",
        "recipe=self_play env=[kuhn_poker,frozen_lake]",
        "recipe=self_play env=kuhn_poker",
        "recipe=self_play plays one environment: name it in env, instead of a list",
    ),
    Row(
        "self_play_has_seats",
        "recipe=self_play env=agent:remote",
        "recipe=self_play env=kuhn_poker",
        (
            "recipe=self_play needs an environment of several agents, and 'agent:remote' is a"
            " program, which asks one model: take an environment such as kuhn_poker, or "
            "recipe=policy_gradient"
        ),
    ),
    Row(
        "mixture_settings_are_of_advantages",
        "algorithm=ppo env=[frozen_lake,guess_number] env.mixture.0.algorithm.gamma=0.9",
        "algorithm=grpo env=[frozen_lake,guess_number] env.mixture.0.algorithm.gamma=0.9",
        (
            "env.mixture: frozen_lake has algorithm settings of its own, which only the "
            "advantages of groups can have: leave them out with an algorithm that has a "
            "critic, or a recipe with its own algorithm"
        ),
    ),
    Row(
        "mixture_has_one_algorithm",
        "env=[frozen_lake,guess_number] env.mixture.0.algorithm=rloo",
        "env=[frozen_lake,guess_number]",
        "env.mixture: frozen_lake names another algorithm: write only settings of it",
    ),
    Row(
        "mixture_settings_have_an_effect",
        "env=[frozen_lake,guess_number] env.mixture.0.algorithm.clip_low=0.1",
        "env=[frozen_lake,guess_number] algorithm.clip_low=0.1",
        (
            "env.mixture: frozen_lake sets algorithm.clip_low of its own, which the "
            "advantages of its groups do not use, as configured. The loss is the same for the"
            " whole batch: write it in the section algorithm of the run, for all environments"
        ),
    ),
    Row(
        "program_is_trained_alone",
        "env=[frozen_lake,agent:remote]",
        "env=agent:remote",
        ("env.mixture: agent:remote is a program, which a run trains alone: write it as env"),
    ),
    Row(
        "program_keeps_its_conversations",
        "env=agent:remote env.rules=Win.",
        "env=agent:remote",
        (
            "env is a program, 'agent:remote', which keeps its own conversations and runs as "
            "it is: leave out env.rules"
        ),
    ),
    Row(
        "programs_in_sandboxes_are_commands",
        "env=agent:remote env.agent.where=inside",
        "env=agent:codex env.agent.where=inside",
        (
            "env.agent.where=inside is for programs that the run starts by a command, and not for"
            " 'agent:remote': write env=\"agent:command ...\" or the name of a coding agent,"
            " without env.isolation and env.python"
        ),
    ),
    Row(
        "contained_programs_are_started_here",
        "env=agent:remote gateway.network=gateway",
        "env=agent:remote",
        (
            "gateway.network=gateway keeps the programs that the run starts from the network,"
            " and agents elsewhere (agent:remote) are started by others: leave it out"
        ),
    ),
    Row(
        "contained_programs_run_in_processes",
        "env=agent:json:dumps gateway.network=gateway",
        "env=agent:json:dumps gateway.network=gateway env.isolation=process",
        (
            "gateway.network=gateway needs a process for each episode, and 'agent:json:dumps'"
            " runs in threads: write env.isolation=process"
        ),
    ),
    Row(
        "workers_have_environments_of_their_own",
        "rollout.workers=2 cluster.env_workers=3",
        "rollout.workers=2",
        (
            "rollout.workers=2 have environments of their own, and cluster.env_workers=3 are for"
            " those that the controller plays: leave one of both out"
        ),
    ),
    Row(
        "workers_have_gateways_of_their_own",
        "rollout.workers=2 env=agent:json:dumps gateway.port=8000",
        "rollout.workers=2 env=agent:json:dumps",
        (
            "gateway.port=8000 is one port, and each of the rollout.workers=2 has a gateway of its"
            " own: leave rollout.workers out"
        ),
    ),
    Row(
        "members_have_others_to_compare_with",
        "rollout.group_size=1",
        "rollout.group_size=2",
        (
            "rollout.group_size is 1, and the algorithm 'grpo', as configured, compares the "
            "members of a group: all advantages would be 0, and nothing would be learned. Set"
            " rollout.group_size to 2 or more (8 is usual), or choose algorithm=ppo, whose "
            "critic needs no group"
        ),
    ),
    Row(
        "branches_can_be_played",
        "rollout.branches={} algorithm=rloo",
        "rollout.branches={} algorithm.advantage=branch",
        (
            "rollout.branches: episodes that share turns need an advantage that knows it, or it"
            " would be biased: write algorithm.advantage=branch or tree, or leave"
            " rollout.branches out"
        ),
    ),
    Row(
        "branches_have_turns_to_choose_from",
        (
            "rollout.branches.at=disagreement rollout.branches.budget=2 rollout.branches.before=3"
            " algorithm.advantage=branch"
        ),
        (
            "rollout.branches.at=disagreement rollout.branches.budget=2 rollout.branches.before=4"
            " algorithm.advantage=branch"
        ),
        (
            "rollout.branches.at=disagreement chooses among turns, and budget=2 is enough for all 2"
            " of them: write rollout.branches.at=every, or raise rollout.branches.before or"
            " rollout.budget.turns"
        ),
    ),
    Row(
        "episodes_have_others_to_be_normalised_with",
        (
            "algorithm=reinforce rollout.group_size=1 rollout.groups_per_step=1 "
            "batch_processing.normalize=batch algorithm.reward_to_go=false"
        ),
        (
            "algorithm=reinforce rollout.group_size=1 rollout.groups_per_step=2 "
            "batch_processing.normalize=batch algorithm.reward_to_go=false"
        ),
        (
            "rollout.groups_per_step and rollout.group_size are 1, and "
            "batch_processing.normalize=batch compares the episodes of a batch: the only "
            "advantage (algorithm.reward_to_go=false) would be 0, and nothing would be "
            "learned. Set rollout.groups_per_step to 2 or more"
        ),
    ),
    Row(
        "critic_advantages_are_not_normalised",
        "algorithm=ppo batch_processing.normalize=batch",
        "algorithm=ppo",
        (
            "batch_processing.normalize=batch normalises what is found by comparing the "
            "members of groups, and 'ppo' asks a critic: leave it out (ppo has "
            "algorithm.whiten=true)"
        ),
    ),
    Row(
        "segments_have_a_critic",
        "rollout.staleness_rule=segment",
        "rollout.staleness_rule=segment algorithm=ppo algorithm.truncated=bootstrap",
        (
            "rollout.staleness_rule=segment trains on parts of episodes that go on, and what "
            "follows them is worth what a critic says: the algorithm 'grpo', as configured, "
            "asks none. Choose algorithm=ppo or algorithm=turn_ppo, with "
            "algorithm.truncated=bootstrap, or another staleness_rule"
        ),
    ),
    Row(
        "segments_have_rewards_of_single_episodes",
        (
            "rollout.staleness_rule=segment algorithm=ppo algorithm.truncated=bootstrap "
            "reward=tests.config.test_compatibility:Ranked"
        ),
        "rollout.staleness_rule=segment algorithm=ppo algorithm.truncated=bootstrap",
        (
            "rollout.staleness_rule=segment trains on parts of groups, and the reward "
            "'Ranked' compares whole ones: leave it out, or choose another staleness_rule"
        ),
    ),
    Row(
        "segments_are_not_filtered",
        (
            "rollout.staleness_rule=segment algorithm=ppo algorithm.truncated=bootstrap "
            "rollout.filter_zero_variance=true"
        ),
        "rollout.staleness_rule=segment algorithm=ppo algorithm.truncated=bootstrap",
        (
            "rollout.staleness_rule=segment trains on parts of groups before their rewards "
            "are known, so these cannot be filtered by them: leave out "
            "rollout.filter_zero_variance and batch_processing.keep_variance"
        ),
    ),
    Row(
        "normalised_advantages_have_no_scale",
        "algorithm=distill batch_processing.normalize=batch",
        "algorithm=distill",
        (
            "batch_processing.normalize=batch divides advantages by their spread, and those "
            "of algorithm=distill are labels or weights, whose size means something: leave it"
            " out"
        ),
    ),
    Row(
        "filtered_groups_teach_nothing",
        "algorithm=ppo rollout.filter_zero_variance=true",
        "rollout.filter_zero_variance=true",
        (
            "rollout.filter_zero_variance leaves out groups whose advantages are all 0, and "
            "algorithm=ppo asks a critic for them, so the group does not tell: write "
            "rollout.filter_zero_variance=false"
        ),
    ),
    Row(
        "kept_groups_teach_all",
        "algorithm=ppo batch_processing.keep_variance=0.9",
        "batch_processing.keep_variance=0.9",
        (
            "batch_processing.keep_variance leaves out groups whose advantages are all 0, and"
            " algorithm=ppo asks a critic for them, so the group does not tell: write "
            "batch_processing.keep_variance=1"
        ),
    ),
    Row(
        "groups_that_vary_teach_more",
        "algorithm=reinforce batch_processing.keep_variance=0.9",
        "algorithm=rloo batch_processing.keep_variance=0.9",
        (
            "batch_processing.keep_variance keeps the groups whose members differ most, and "
            "algorithm=reinforce does not compare the members of a group: it learns as much "
            "from the others, and without them its gradient may point backwards. Write "
            "batch_processing.keep_variance=1, or choose an algorithm that compares (grpo, "
            "rloo)"
        ),
    ),
    Row(
        "opponents_are_the_same_after_a_resume",
        "env=kuhn_poker env.agents.south.name=frozen env.agents.south.refresh=3",
        "env=kuhn_poker env.agents.south.name=frozen env.agents.south.refresh=5",
        (
            "env.agents.south.refresh (3) must divide checkpoint.every (10), or a resumed run"
            " would meet other opponents than an uninterrupted one"
        ),
    ),
    Row(
        "best_names_a_suite",
        "checkpoint.best=eval/hard/success",
        "checkpoint.best=eval/success evaluation.every=10",
        "checkpoint.best names the suite 'hard'; there is none",
    ),
    Row(
        "best_is_measured_when_steps_are_saved",
        "checkpoint.best=eval/success evaluation.every=7",
        "checkpoint.best=eval/success evaluation.every=20",
        (
            "checkpoint.best needs evaluations of steps that are saved: checkpoint.every (10)"
            " must divide evaluation.every (7), and evaluation.tasks (200) must be more than "
            "0"
        ),
    ),
    Row(
        "best_reward_is_of_single_episodes",
        (
            "checkpoint.best=eval/reward evaluation.every=10 "
            "reward=tests.config.test_compatibility:Ranked"
        ),
        "checkpoint.best=eval/reward evaluation.every=10",
        (
            "checkpoint.best=eval/reward is never measured: evaluations play each task once, "
            "and every part of the reward compares the members of a group. Add a part that "
            "scores single episodes, or write checkpoint.best=eval/success if the environment"
            " gives a verdict"
        ),
    ),
    Row(
        "suites_name_their_environment",
        'env=[frozen_lake,guess_number] evaluation.suites=[{"name":"hard"}]',
        ('env=[frozen_lake,guess_number] evaluation.suites=[{"name":"hard","env":"frozen_lake"}]'),
        ("evaluation.suites: the run has several environments, so name that of hard in its env"),
    ),
    Row(
        "engine_reads_arrivals",
        "engine.name=openai engine.url=http://localhost:8000 weights.transport=stream",
        "engine=vllm weights.transport=stream",
        (
            "weights.transport=stream: engine 'openai' cannot load weights as they arrive"
            " (`EngineOffers.reads_arrivals`). Write weights.transport=auto"
        ),
    ),
    Row(
        "engine_reports_experts",
        "engine.name=openai engine.url=http://localhost:8000 trainer.routing=replay",
        "engine=vllm trainer.routing=replay",
        (
            "trainer.routing=replay: engine 'openai' does not say which experts it chose. Leave"
            " the setting out, or write engine=vllm (on GPUs) or engine=local"
        ),
    ),
    Row(
        "engine_takes_weights",
        "engine.name=openai engine.url=http://localhost:8000",
        "engine=local",
        (
            "engine=openai samples from a model that is served elsewhere: it can neither take"
            " new weights nor say what truncated sampling left to sample from. Train with "
            "engine=vllm or engine=local, and evaluate with engine=openai (`agentrl eval`)"
        ),
    ),
    Row(
        "trainer_reads_pictures",
        "env=frozen_lake env.options.view=picture trainer=deepspeed",
        "env=frozen_lake env.options.view=grid trainer=deepspeed",
        (
            "frozen_lake shows pictures, and trainer=deepspeed learns from text alone: choose what"
            " the environment says in words, such as env.options.view=grid"
        ),
    ),
    Row(
        "engine_gets_whole_models",
        "model=sees engine=tests.config.test_compatibility:Reader",
        "model=sees engine=vllm",
        (
            "model=sees sees, and engine=tests.config.test_compatibility:Reader takes updates of"
            " whole models only, in which frozen parts are missing: write"
            " trainer.train_tower=true and trainer.train_projector=true, which take no gradients"
            " without pictures, or engine=local"
        ),
    ),
    Row(
        "proposals_are_sampled_without_min_p",
        "engine=vllm engine.speculative.tokens=2 evaluation.min_p=0.1",
        "engine=vllm engine.speculative.tokens=2 evaluation.top_p=0.9",
        (
            "evaluation.min_p is above 0, and engine.speculative cannot check proposed tokens"
            " against it (vLLM refuses such requests): leave one of both out, or write top_p"
            " instead"
        ),
    ),
    Row(
        "cluster_can_place",
        "placement=colocated",
        "placement=local",
        (
            "placement: colocated, but cluster=local puts everything on the first device: "
            "write placement=local, or take a cluster that can place (cluster=ray)"
        ),
    ),
]


class Reader(LocalEngine):
    """An engine that reads text alone."""

    offers = EngineOffers()


BY_NAME = {rule.name: rule for rule in compatibility.RULES}


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config, beside the folder of a model that sees."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text("env: frozen_lake\n")
    folder = tmp_path / "sees"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    return path


def problem(path: Path, overrides: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of one rule, whatever the others say of the config."""
    with monkeypatch.context() as patched:
        patched.setattr(compatibility, "RULES", ())
        config = load_config(path, overrides.split()).config
    return BY_NAME[rule].problem(ConfiguredRun(config))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_a_rule_refuses_what_breaks_it_and_nothing_else(row, lake, monkeypatch):
    assert problem(lake, row.breaks, row.rule, monkeypatch) == row.message
    assert problem(lake, row.keeps, row.rule, monkeypatch) == ""
    with pytest.raises(ConfigError) as refusal:
        check_stage(load_config(lake, row.breaks.split()).config, BY_NAME[row.rule].stage)
    assert str(refusal.value) == row.message


def test_every_rule_has_a_row_and_names_settings_that_exist():
    assert [row.rule for row in ROWS] == list(BY_NAME)
    sections = compatibility.RunConfig.model_fields
    for rule in compatibility.RULES:
        assert {setting.partition(".")[0] for setting in rule.settings} <= sections.keys()


class ShortRunSettings(Settings):
    """The settings of a recipe of a plug-in."""

    most_steps: int = 3

    def check_run(self, config: compatibility.RunConfig) -> None:
        if config.steps > self.most_steps:
            raise ValueError(f"recipe.most_steps is {self.most_steps}: lower steps")


async def short_run(run: object, settings: ShortRunSettings) -> None:
    """A recipe of a plug-in."""


def test_the_recipe_of_a_plug_in_adds_a_rule(lake):
    recipe = f"recipe={__name__}:short_run"
    assert load_config(lake, [recipe, "steps=3"]).config.steps == 3
    with pytest.raises(ConfigError) as refusal:
        load_config(lake, [recipe, "steps=4"])
    assert str(refusal.value) == "recipe.most_steps is 3: lower steps"


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ("rollout.workers=2", "rollout.workers play no branches yet"),
        ("rollout.extra_members=1", "rollout.extra_members end a group before"),
        ("rollout.context.name=last_k rollout.context.turns=2", "shows the model other prompts"),
        ("batch_processing.normalize=batch", "counts the turns that branches share more than once"),
        ("env=agent:examples.agent:play", "cannot go back to a state"),
        ("recipe=iterative_dpo", "recipe=iterative_dpo plays no branches"),
    ],
)
def test_what_branches_do_not_go_with_is_named(lake: Path, also: str, said: str) -> None:
    overrides = f"rollout.branches.at=every algorithm.advantage=branch {also}".split()
    with pytest.raises(ConfigError, match=f"rollout.branches: .*{said}.*Leave one of both out"):
        load_config(lake, overrides)
