"""A whole step of GRPO, of conversations with a tool, in agentrl and in TRL's trainer: rollouts,
scoring, training and weights.

    python benchmarks/step_peers.py [--steps 4] [--threads 2]

Needs TRL and what it needs: `pip install trl==1.16.0 accelerate datasets jmespath`. Each contender
runs in a process of its own, one after another, from the same weights: `PROMPTS` x `MEMBERS`
conversations of `TURNS` turns. A random model calls no tools, so both take whatever it says for a
call, and no answer ends before it has `TOKENS` tokens: all sample, read and train on the same
numbers of tokens. Both train on what they have just sampled, with one update a step.

TRL samples by transformers' `generate`, which reads the whole conversation again in each turn.
agentrl's engine keeps what it has read. Figures are of the fastest step after the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.engines.local import LocalEngine
from agentrl.envs.base import TextEnv
from agentrl.protocols import GenerateRequest, StepResult
from agentrl.trajectory import Completion

PROMPTS, MEMBERS, TURNS, TOKENS = 4, 4, 4, 64
INSTRUCTIONS = "Look up what you need, one entry at a time, and then answer. " * 3
QUESTION = "What is known about entry {}? "
RESULT = "The entry says that the one after it has the rest of the answer. "
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up an entry.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "The entry's name."}},
            "required": ["name"],
        },
    },
}
LR = 1e-5
CONTENDERS = ("agentrl", "TRL 1.16")
PARTS = ("rollout", "scoring", "train", "weights")


class LookUp(TextEnv):
    """Answers each message with the same result; the last one ends the episode."""

    isolation = "inline"
    system_prompt = INSTRUCTIONS
    tools = (TOOL,)

    def start(self, seed: int, options: object) -> str:
        """Ask the question of this seed."""
        self._turns = 0
        return QUESTION.format(seed % PROMPTS)

    def step(self, action: str) -> StepResult:
        """Take a message for a call."""
        self._turns += 1
        return RESULT, reward_of(action), self._turns == TURNS, False, {}


class EndlessEngine(LocalEngine):
    """An engine whose answers end at `max_tokens` only."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        sampling = request.sampling.model_copy(update={"stop_token_ids": ()})
        return await super().generate(replace(request, sampling=sampling))


def reward_of(text: str) -> float:
    """The share of vowels."""
    return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))


def run_agentrl(model: Path, folder: Path, steps: int) -> dict[str, Any]:
    """A run by `agentrl train`, which waits for all episodes of a step."""
    from agentrl.runs.train import train

    config = folder / "config.yaml"
    config.write_text(
        f"""
env: step_peers:LookUp
model: {model}
engine: {{name: step_peers:EndlessEngine, max_batch: 16}}
steps: {steps}
rollout:
  groups_per_step: {PROMPTS}
  group_size: {MEMBERS}
  max_staleness: 0
  budget: {{turns: {TURNS}}}
  sampling: {{max_tokens: {TOKENS}}}
trainer: {{lr: {LR}, micro_batch_tokens: 8192}}
evaluation: {{tasks: 0}}
trackers: []
run_dir: {folder / "run"}
"""
    )
    train(config, [])
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    found = [
        {
            "seconds": row["seconds"],
            "sampled": row["sampled_tokens"],
            **{part: row.get(f"seconds/{part}", 0.0) for part in PARTS},
        }
        for row in rows
        if "seconds" in row
    ]
    return min(found[1:], key=lambda step: step["seconds"])


def run_trl(model: Path, folder: Path, steps: int) -> dict[str, Any]:
    """TRL's GRPO trainer with a tool."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    # Any: some of what is set below is not meant to be.
    trl: Any = import_module("trl")
    grpo_trainer: Any = import_module("trl.trainer.grpo_trainer")
    found: list[dict[str, float]] = []
    said: dict[str, int] = {}

    def look_up(name: str) -> str:
        """Look up an entry.

        Args:
            name: The entry's name.
        """
        return RESULT

    def parse(tokenizer: Any, ids: Any, *, prefix: Any, tools: Any) -> dict[str, Any]:
        """Whatever is said is a call, until the last turn."""
        text = tokenizer.decode(ids)
        said["turn"] += 1
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if said["turn"] <= (TURNS - 1) * PROMPTS * MEMBERS:
            call = {"name": "look_up", "arguments": {"name": text}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            answer = function(*arguments, **named)
            found[-1][part] += time.perf_counter() - began
            return answer

        return run

    def sampled(generated: Any) -> Any:
        _, ids, tool_mask, *_ = generated
        found[-1]["sampled"] += sum(map(sum, tool_mask)) if tool_mask else sum(map(len, ids))
        return generated

    class Timed(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            found.append({"began": time.perf_counter(), **dict.fromkeys((*PARTS, "sampled"), 0.0)})
            said["turn"] = 0

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            step = found[-1]
            step["seconds"] = time.perf_counter() - step.pop("began")
            step["train"] = step["seconds"] - step["rollout"] - step["scoring"]

    grpo_trainer.parse_response = parse
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = {}  # `parse` needs none, and TRL has none for this template
    # It asks for a template that can write calls; those of the conversations are never written.
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content + '<|end|>'",
        "message.content + (message.tool_calls | tojson if message.tool_calls else '') + '<|end|>'",
    )
    length = TURNS * (TOKENS + 2 * len(tokenizer(RESULT).input_ids))
    config = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * MEMBERS,
        num_generations=MEMBERS,
        max_completion_length=length,
        max_tool_calling_iterations=TURNS - 1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        loss_type="dapo",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = [
        [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": QUESTION.format(number)},
        ]
        for number in range(PROMPTS)
    ]
    trainer = trl.GRPOTrainer(
        str(model),
        lambda completions, **_: [reward_of(str(one[-1]["content"])) for one in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts * steps}),
        processing_class=tokenizer,
        tools=[look_up],
    )
    trainer.generation_config.max_new_tokens = TOKENS  # of a turn; else of a conversation
    trainer.generation_config.min_new_tokens = TOKENS
    generate = trainer._generate
    trainer._generate = timed("rollout", lambda prompts: sampled(generate(prompts)))
    trainer._calculate_rewards = timed("scoring", trainer._calculate_rewards)
    trainer.add_callback(Timed())
    trainer.train()
    return min(found[1:], key=lambda step: step["seconds"])


RUNS = dict(zip(CONTENDERS, (run_agentrl, run_trl), strict=True))


def measured(name: str, model: Path, folder: Path, steps: int, threads: int) -> dict[str, Any]:
    """A contender's figures."""
    folder.mkdir()
    command = [sys.executable, __file__, "--contender", name, "--steps", str(steps)]
    command += ["--model", str(model), "--folder", str(folder)]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    print(f"{name}: done", file=sys.stderr, flush=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(steps: int, threads: int) -> None:
    """Print a table of both."""
    from agentrl.models.tiny import create_tiny_model

    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        create_tiny_model(folder / "model")
        found = {
            name: measured(name, folder / "model", folder / f"run-{number}", steps, threads)
            for number, name in enumerate(CONTENDERS)
        }
    table = Table(
        title=f"{PROMPTS * MEMBERS} conversations of {TURNS} turns of {TOKENS} tokens, a tiny"
        f" model, {threads} threads"
    )
    for column in ("", "step, s", *(f"{part}, s" for part in PARTS), "sampled", "x time"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in found.items():
        parts = (f"{one[part]:.2f}" for part in PARTS)
        ratio = one["seconds"] / found["agentrl"]["seconds"]
        table.add_row(
            name, f"{one['seconds']:.2f}", *parts, f"{one['sampled']:,.0f}", f"{ratio:.2f}"
        )
    Console().print(table)


def main() -> None:
    """Compare, or run one contender for the process that compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of torch, in each contender")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender is None:
        compare(max(2, given.steps), given.threads)
        return
    print("\n" + json.dumps(RUNS[given.contender](given.model, given.folder, given.steps)))


if __name__ == "__main__":
    main()
