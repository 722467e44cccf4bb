"""The same GRPO step in agentrl, in TRL's trainer and in a plain loop around transformers:
`trainer.py --peers`.

Needs TRL and what it needs: `pip install trl==1.16.0 accelerate datasets`. Each contender runs in a
process of its own, one after another, from the same weights on the same conversations: groups of
conversations with tools, of which only the calls carry loss. All of them begin with the same
instructions, and those of a group with the same task; in the second table no two have a beginning
in common. Each makes the same updates: the weights after them are compared.

Contenders other than agentrl pad `ROWS` conversations at a time, compute no old logprobs, and keep
their activations. Seconds and CPU seconds are of the fastest step after the first; the peak is what
the process's memory grew by during the steps.
"""

import argparse
import asyncio
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from agentrl.algorithms.grpo import Grpo
from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.models.tiny import create_tiny_model
from agentrl.trainers.local import LocalTrainer

GROUPS, MEMBERS, TURNS, ROWS = 8, 8, 4, 8
INSTRUCTIONS, TASK, CALL, RESULT = 220, 40, 40, 60
"""Tokens of each; those of calls and results vary by a third."""
LR, BETAS = 1e-4, (0.9, 0.95)
CONTENDERS = ("agentrl", "TRL 1.16", "plain transformers")


def conversations(vocab: int, groups: int, *, shared: bool) -> list[TrainingSample]:
    """Conversations of `TURNS` calls with a result after each but the last."""
    rng = np.random.default_rng(0)

    def said(length: int) -> np.ndarray[Any, Any]:
        return rng.integers(10, vocab, int(length * rng.uniform(2 / 3, 4 / 3)))

    instructions, made = rng.integers(10, vocab, INSTRUCTIONS), []
    for number in range(groups):
        task = rng.integers(10, vocab, TASK)
        for advantage in rng.permutation(np.linspace(-1.5, 1.5, MEMBERS)):
            begun = (
                [instructions, task] if shared else [rng.integers(10, vocab, INSTRUCTIONS + TASK)]
            )
            pieces, loss = [*begun], [np.zeros(len(piece), bool) for piece in begun]
            for turn in range(TURNS):
                pieces.append(said(CALL))
                loss.append(np.ones(len(pieces[-1]), bool))
                if turn < TURNS - 1:
                    pieces.append(said(RESULT))
                    loss.append(np.zeros(len(pieces[-1]), bool))
            ids, loss_T = np.concatenate(pieces), np.concatenate(loss)
            none = np.zeros(len(ids))
            sample = TrainingSample(
                ids, loss_T, none, advantage * loss_T, loss_T.astype(int) - 1, none, group=number
            )
            made.append(sample)
    return made


class Watch:
    """Measures steps: seconds, CPU seconds, and by how much memory grew, in bytes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self._before = self._status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins again

    def step(self, step: Callable[[], object]) -> None:
        """Make a step."""
        self.begin()
        step()
        self.end()

    def begin(self) -> None:
        """A step begins."""
        self._since = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """It ends."""
        wall, cpu = self._since
        self.seconds.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def found(self, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the main process is sent; `check` is a few of the weights."""
        name = "model.layers.0.mlp.down_proj.weight"
        check = weights[name].detach().flatten()[:200].double().tolist()
        return {
            "seconds": min(self.seconds[1:]),
            "cpu": min(self.cpu[1:]),
            "peak": self._status("VmHWM") - self._before,
            "check": check,
        }

    @staticmethod
    def _status(name: str) -> int:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
        raise RuntimeError(f"/proc/self/status has no {name}")


def run_agentrl(model: Path, batch: TrainBatch, steps: int) -> dict[str, Any]:
    """The local trainer."""

    async def main() -> dict[str, Any]:
        config = LocalTrainer.Config(
            lr=LR, betas=BETAS, device="cpu", dtype="float32", micro_batch_tokens=4096
        )
        # The others have no engine whose logprobs differ.
        algorithm = Grpo(Grpo.Config(importance_cap=None))
        async with LocalTrainer(config, model, total_steps=steps) as trainer:
            watch = Watch()
            for _ in range(steps):
                watch.begin()
                await trainer.step(batch, algorithm.loss, float(batch.num_loss_tokens))
                watch.end()
            return watch.found(await trainer.weights())

    return asyncio.run(main())


def padded(batch: TrainBatch) -> dict[str, torch.Tensor]:
    """All conversations, padded at their ends: ids, whether a token is one, loss mask, and
    advantages.
    """
    ends = np.cumsum(batch.lengths_M)[:-1]
    ids = [torch.from_numpy(row.astype(np.int64)) for row in np.split(batch.tokens_S, ends)]
    loss = [torch.from_numpy(row.copy()) for row in np.split(batch.loss_mask_S, ends)]
    firsts = np.cumsum(batch.loss_tokens_M) - batch.loss_tokens_M
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "ids": pad(ids, batch_first=True),
        "is_token": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "loss": pad(loss, batch_first=True).long(),
        "advantages": torch.from_numpy(batch.advantages_N[firsts].copy()),
    }


def run_plain(model_dir: Path, batch: TrainBatch, steps: int) -> dict[str, Any]:
    """The naive version: rows padded to the longest, logits of all their tokens, AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    rows = padded(batch)

    def step() -> None:
        optimizer.zero_grad()
        for first in range(0, len(rows["ids"]), ROWS):
            part = {name: value[first : first + ROWS] for name, value in rows.items()}
            longest = int(part["is_token"].sum(1).max())
            ids, is_token, loss_mask = (
                part[name][:, :longest] for name in ("ids", "is_token", "loss")
            )
            logits = (
                model(input_ids=ids, attention_mask=is_token, use_cache=False)
                .logits[:, :-1]
                .float()
            )
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            loss = (
                -(ratio * part["advantages"][:, None] * loss_mask[:, 1:]).sum()
                / batch.num_loss_tokens
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    watch = Watch()
    for _ in range(steps):
        watch.step(step)
    return watch.found(dict(model.named_parameters()))


def run_trl(model_dir: Path, batch: TrainBatch, steps: int) -> dict[str, Any]:
    """TRL's GRPO trainer, which gets the conversations where it would sample them."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def no_reward(completions: list[Any], **given: Any) -> list[float]:
        return [0.0] * len(completions)

    rows = padded(batch)
    prompt = INSTRUCTIONS + TASK

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return {
                "prompt_ids": rows["ids"][:, :prompt],
                "prompt_mask": rows["is_token"][:, :prompt],
                "completion_ids": rows["ids"][:, prompt:],
                "completion_mask": rows["is_token"][:, prompt:],
                "tool_mask": rows["loss"][:, prompt:],
                "advantages": rows["advantages"],
                "num_items_in_batch": torch.tensor(float(batch.num_loss_tokens)),
            }

    class Timed(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.end()

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=batch.num_samples // ROWS,
            num_generations=MEMBERS,
            max_completion_length=rows["ids"].shape[1] - prompt,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=1.0,
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
        data = Dataset.from_dict({"prompt": ["go"] * batch.num_samples})
        trainer = Given(
            str(model_dir),
            lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=data,
        )
        trainer.add_callback(Timed())
        watch = Watch()
        trainer.train()
        return watch.found(dict(trainer.model.named_parameters()))


RUNS = dict(zip(CONTENDERS, (run_agentrl, run_trl, run_plain), strict=True))


def measured(folder: Path, steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each contender's figures."""
    for name in CONTENDERS:
        command = [
            sys.executable,
            __file__,
            "--contender",
            name,
            "--folder",
            str(folder),
            "--steps",
            str(steps),
        ]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {found['seconds']:.2f} s a step", file=sys.stderr, flush=True)
        yield name, found


def compare(steps: int, groups: int = GROUPS) -> None:
    """Print a table for conversations with shared beginnings, and one for others."""
    console = Console()
    for shared in (True, False):
        with tempfile.TemporaryDirectory() as given:
            folder = Path(given)
            create_tiny_model(folder / "model")
            vocab = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))[
                "vocab_size"
            ]
            batch = collate(conversations(vocab, groups, shared=shared))
            (folder / "batch").write_bytes(pickle.dumps(batch))
            found = dict(measured(folder, steps))
        what = "shared instructions and tasks" if shared else "nothing in common"
        size = (
            f"{batch.num_samples} conversations, {len(batch.tokens_S):,} tokens,"
            f" {batch.num_loss_tokens:,} with loss"
        )
        table = Table(title=f"{what}: {size}")
        for column in (
            "",
            "step, s",
            "CPU-s",
            "peak, MiB",
            "x time",
            "x CPU",
            "x peak",
            "weights off by",
        ):
            table.add_column(column, justify="right" if column else "left")
        own = found["agentrl"]
        for name, one in found.items():
            ratios = [f"{one[key] / own[key]:.2f}" for key in ("seconds", "cpu", "peak")]
            gap = max(abs(a - b) for a, b in zip(one["check"], own["check"], strict=True))
            figures = (f"{one['seconds']:.2f}", f"{one['cpu']:.2f}", f"{one['peak'] / 2**20:,.0f}")
            table.add_row(name, *figures, *ratios, f"{gap:.1e}")
        console.print(table)


def main() -> None:
    """Run one contender, for the process of `compare`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--groups", type=int, default=GROUPS, help=f"each of {MEMBERS} conversations"
    )
    given = parser.parse_args()
    if given.contender is None:
        compare(max(2, given.steps), given.groups)
        return
    batch = pickle.loads((given.folder / "batch").read_bytes())
    print(json.dumps(RUNS[given.contender](given.folder / "model", batch, given.steps)))


if __name__ == "__main__":
    main()
