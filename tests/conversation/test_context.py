"""Context policies: what the model is shown at each turn, as exact tokens. (Their property is in
test_agents.py.)
"""

from collections.abc import Sequence

import pytest
from pydantic import TypeAdapter

from agentrl.batch import to_samples
from agentrl.conversation.context import Context, ContextPolicy, Full, LastK, Scratchpad, Summary
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.flow import run_virtual
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.pool import EnvPool
from agentrl.models.tiny import create_tiny_model
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import END, ByteTokenizer
from agentrl.trajectory import Task, Terminated, Trajectory, Truncated


class Rooms:
    """Says which room it is, five times."""

    isolation = "inline"
    system_prompt = "S"

    def reset(self, *, seed, options):
        self.room = 0
        return "room 0", {}

    def step(self, action):
        self.room += 1
        return f"room {self.room}", 1.0, self.room == 5, False, {}

    def close(self):
        pass


def played(
    context: ContextPolicy, answers: Sequence[str], renderer=None, max_context=2048, make_env=Rooms
) -> tuple[Trajectory, list[str]]:
    """An episode with these answers, in turns, and the prompts that the engine saw, as text."""
    renderer = renderer or TemplateRenderer(ByteTokenizer())

    def reply(request):
        return renderer.encode(answers[int(request.id.rpartition("/")[2]) % len(answers)])

    async def main():
        engine = ScriptedEngine.replying(reply, max_context=max_context)
        async with engine:
            policy = EnginePolicy(
                engine,
                SamplingParams(
                    max_tokens=400, temperature=1.0, stop_token_ids=renderer.stop_token_ids
                ),
                60,
            )
            player = EnvEpisodeRunner(
                policy,
                renderer,
                EnvPool({"env": make_env}, EnvDeadlines()),
                Budget(turns=50),
                600,
                context,
            )
            (trajectory,) = await player.play(Assignment("e", Task("env", 0), 0))
        return trajectory, [renderer.decode(request.prompt_ids) for request in engine.requests]

    return run_virtual(main)


def shown(*messages: str) -> str:
    return "".join(message + END for message in messages) + "assistant:"


OPENING = ("system:S", "user:room 0")


def test_full_shows_everything_and_never_forks():
    trajectory, prompts = played(Full(), "abcde")
    assert prompts[-1] == shown(
        *OPENING,
        "assistant:a",
        "user:room 1",
        "assistant:b",
        "user:room 2",
        "assistant:c",
        "user:room 3",
        "assistant:d",
        "user:room 4",
    )
    assert not any(turn.forked for turn in trajectory.turns)
    assert len(to_samples(trajectory, 1.0)) == 1


def test_last_k_shows_the_opening_and_the_last_exchanges_and_forks_when_it_begins_to_forget():
    trajectory, prompts = played(LastK(turns=2), "abcde")
    assert prompts[2] == shown(*OPENING, "assistant:a", "user:room 1", "assistant:b", "user:room 2")
    assert prompts[3] == shown(*OPENING, "assistant:b", "user:room 2", "assistant:c", "user:room 3")
    assert prompts[4] == shown(*OPENING, "assistant:c", "user:room 3", "assistant:d", "user:room 4")
    assert [turn.forked for turn in trajectory.turns] == [False, False, False, True, True]
    samples = to_samples(trajectory, 1.0)
    assert [sum(sample.loss_mask) for sample in samples] == [
        6,
        2,
        2,
    ], "an answer is trained where it was sampled only"
    assert [m.content for m in trajectory.messages if m.role == "assistant"] == [*"abcde"], (
        "the transcript is whole"
    )


def test_a_scratchpad_is_carried_until_another_is_written():
    pad = "<scratchpad>{}</scratchpad>".format
    trajectory, prompts = played(
        Scratchpad(prompt="Use the pad."),
        ["left", pad("1") + "up", "down", "no <scratchpad>2" + pad("3")[12:] + pad("4"), "end"],
    )
    opening = ("system:S\n\nUse the pad.", "user:room 0")
    assert prompts[0] == shown(*opening)
    assert prompts[1] == shown(*opening, f"assistant:{pad('')}", "user:room 1")
    assert prompts[2] == shown(*opening, f"assistant:{pad('1')}", "user:room 2")
    assert prompts[3] == shown(*opening, f"assistant:{pad('1')}", "user:room 3")
    assert prompts[4] == shown(*opening, f"assistant:{pad('4')}", "user:room 4")
    assert trajectory.env_return == 5


def test_a_summary_is_a_turn_of_its_own_and_stands_for_what_was_before_it():
    first = len(shown(*OPENING, "assistant:a", "user:room 1"))
    trajectory, prompts = played(
        Summary(max_prompt_tokens=first, prompt="Sum up."),
        ["a", "b", "did ab", "c", "abc", "d", "abcd", "e"],
    )
    assert trajectory.status == Terminated()
    assert prompts[2] == shown(
        *OPENING, "assistant:a", "user:room 1", "assistant:b", "user:Sum up."
    )
    assert prompts[3] == shown(*OPENING, "assistant:did ab", "user:room 2")
    assert prompts[4] == shown(
        *OPENING, "assistant:did ab", "user:room 2", "assistant:c", "user:Sum up."
    )
    assert prompts[5] == shown(*OPENING, "assistant:abc", "user:room 3")
    summaries = [turn.info.get("context") == "summary" for turn in trajectory.turns]
    assert summaries == [False, False, True, False, True, False, True, False]
    assert [turn.reward for turn in trajectory.turns] == [
        0.0 if is_one else 1.0 for is_one in summaries
    ]
    assert [turn.forked for turn in trajectory.turns] == [
        False,
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    said = "".join(m.content for m in trajectory.messages if m.role == "assistant")
    assert said == "abdid abcabcdabcde"
    learnt = sum(sum(sample.loss_mask) for sample in to_samples(trajectory, 1.0))
    assert learnt == len(said) + 8, "summaries are trained, with their ends of turn"


def test_masked_summaries_are_the_same_tokens_without_loss():
    answers = ["a", "b", "did ab", "c", "abc", "d", "abcd", "e"]
    limit = len(shown(*OPENING, "assistant:a", "user:room 1"))
    trained, masked = (
        played(Summary(max_prompt_tokens=limit, prompt="Sum up.", train=train), answers)
        for train in (True, False)
    )
    assert masked[1] == trained[1], "the engine sees the same prompts"
    samples = to_samples(masked[0], 1.0)
    for sample, other in zip(samples, to_samples(trained[0], 1.0), strict=True):
        assert sample.token_ids.tolist() == other.token_ids.tolist()
    learnt = "".join(
        TemplateRenderer(ByteTokenizer()).decode(sample.token_ids[sample.loss_mask])
        for sample in samples
    )
    assert learnt.replace(END, "") == "abcde"


def test_a_sample_of_nothing_but_a_masked_summary_is_left_out():
    trajectory, _ = played(Summary(max_prompt_tokens=1, train=False), ["a"])
    assert len(trajectory.turns) == 9
    kept = to_samples(trajectory, 1.0)
    assert [sum(sample.loss_mask) for sample in kept] == [2] * 5
    assert [sample.continues for sample in kept] == [False, True, True, True, True]


def test_a_summary_that_does_not_fit_into_the_context_truncates_the_episode():
    long = "x" * 300
    trajectory, _ = played(Summary(max_prompt_tokens=100), ["a", long, "c"], max_context=400)
    assert trajectory.status == Truncated("context")
    assert len(trajectory.turns) == 2


def test_turns_of_the_environment_are_what_the_budget_counts():
    summary = Summary(max_prompt_tokens=1, prompt="Sum up.")
    trajectory, _ = played(summary, ["a"])
    assert trajectory.status == Terminated()
    assert len(trajectory.turns) == 9, (
        "five for the environment, and a summary before each but the first"
    )


@pytest.mark.parametrize("template", ["compact", "chatml"])
@pytest.mark.parametrize(
    "context", [LastK(turns=1), Scratchpad(), Summary(max_prompt_tokens=60)], ids=lambda c: c.name
)
def test_real_templates_show_what_they_are_told_to(tmp_path, template, context):
    create_tiny_model(tmp_path / "m", template=template)
    renderer = TemplateRenderer.of_model(tmp_path / "m")
    trajectory, prompts = played(context, ["go <scratchpad>note</scratchpad>"], renderer)
    assert trajectory.status == Terminated()
    assert all("room 0" in prompt for prompt in prompts)
    assert "room 2" not in prompts[-1]
    assert "room 4" in prompts[-1]
    seen = [sample.token_ids[: sample.loss_mask.argmax()] for sample in to_samples(trajectory, 1.0)]
    assert renderer.decode(seen[-1]) in prompts


def test_the_middle_of_a_long_observation_is_left_out_and_all_of_the_task_is_shown():
    class Long(Rooms):
        def reset(self, *, seed, options):
            return "0123456789" + super().reset(seed=seed, options=options)[0], {}

        def step(self, action):
            return f"begin {'x' * 100} end", *super().step(action)[1:]

    context = Full(observation_characters=9)
    trajectory, prompts = played(context, ["a"], make_env=Long)
    assert trajectory.status == Terminated()
    cut = "begin\n[101 characters left out]\n end"
    assert prompts[1] == shown(OPENING[0], "user:0123456789room 0", "assistant:a", f"user:{cut}")


def test_a_config_names_a_context():
    adapter = TypeAdapter(Context)
    assert adapter.validate_python("full") == Full()
    assert adapter.validate_python({"name": "last_k", "turns": 3}) == LastK(turns=3)
    config = RolloutConfig(context={"name": "summary", "max_prompt_tokens": 9})
    assert RolloutConfig.model_validate(config.model_dump(mode="json")) == config
