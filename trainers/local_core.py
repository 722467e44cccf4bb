"""What `LocalTrainer` computes, in torch: apart from its settings, which a command reads without loading torch."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.batch import TrainBatch, micro_batches, minibatches
from agentrl.errors import ConfigError, TrainingError
from agentrl.protocols import Loss, LossTokens
from agentrl.trainers.checkpoint import load_checkpoint, named_weights, no_progress_bars, save_checkpoint
from agentrl.trainers.forward import MicroBatch, check_model, to_device, token_logprobs
from agentrl.trainers.schedule import learning_rate
from agentrl.trainers.settings import TrainerSettings

if TYPE_CHECKING:
    from agentrl.trainers.local import LocalTrainer


@dataclass(slots=True)
class LocalCore:
    """Model, optimizer and schedule: what the worker thread works on."""

    config: "LocalTrainer.Config"
    origin: Path
    total_steps: int
    temperature: float
    device: torch.device
    model: Any
    optimizer: torch.optim.AdamW
    steps_done: int = 0

    @staticmethod
    def open(config: "LocalTrainer.Config", origin: Path, total_steps: int, temperature: float) -> "LocalCore":
        """Load the model and make the optimizer."""
        device = _device(config.device)
        model = _load_model(origin, config, device)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        return LocalCore(config, origin, total_steps, temperature, device, model, optimizer)

    def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        if batch.num_loss_tokens < 1 or not 0 < normalizer < math.inf:
            raise TrainingError(
                f"cannot train on {batch.num_loss_tokens} loss tokens with the normalizer {normalizer}: a batch needs "
                "a sampled token, and a normalizer above zero"
            )
        lr = learning_rate(self.config, self.steps_done, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tally = _Tally()
        parts = [self._cut(part) for part in minibatches(batch, self.config.minibatches)]
        # Nothing is updated before the first minibatch: its logprobs are the old ones themselves.
        olds: list[list[Tensor | None]] = [
            [None for _ in parts[0]],
            *(self._old_logprobs(part, tally) for part in parts[1:]),
        ]
        for part, old in zip(parts, olds, strict=True):
            # Each minibatch is divided by an equal share, so a token weighs the same in whichever it falls.
            self._accumulate(part, old, loss, normalizer / len(parts), tally)
            self._update(tally)
        self.steps_done += 1
        tokens = sum(int((rows.segment_ids_BT > 0).sum()) for part in parts for rows in part)
        places = sum(rows.tokens_BT.size for part in parts for rows in part)
        return {
            "loss": float(tally.loss) / len(parts),
            "grad_norm": tally.grad_norm,
            "lr": lr,
            "tokens": float(tokens),
            "loss_tokens": float(batch.num_loss_tokens),
            "packing": tokens / places,
            **tally.means(batch.num_loss_tokens),
            "logprob_gap_max": float(tally.gap_max),
            **{f"seconds_{phase}": seconds for phase, seconds in tally.seconds.items()},
        }

    def _cut(self, part: TrainBatch) -> list[TrainBatch]:
        """Micro-batches, without those that have nothing to learn from."""
        return [rows for rows in micro_batches(part, self.config.micro_batch_tokens) if rows.num_loss_tokens]

    def _logprobs(self, rows: MicroBatch) -> Tensor:
        with self._precision():
            return token_logprobs(self.model, rows, self.temperature)

    def _old_logprobs(self, part: list[TrainBatch], tally: "_Tally") -> list[Tensor | None]:
        """The trainer's logprobs before the first update on this batch."""
        with tally.phase("old_logprobs"), torch.no_grad():
            return [self._logprobs(to_device(rows, self.device)) for rows in part]

    def _accumulate(
        self, part: list[TrainBatch], old: list[Tensor | None], loss: Loss, normalizer: float, tally: "_Tally"
    ) -> None:
        """Sum the gradients of a minibatch: those of sum(token losses) / normalizer, however it is cut."""
        with tally.phase("forward_backward"):
            self.optimizer.zero_grad(set_to_none=True)
            for packed, old_N in zip(part, old, strict=True):
                rows = to_device(packed, self.device)
                logprobs_N = self._logprobs(rows)
                before_N = logprobs_N.detach() if old_N is None else old_N
                tokens = LossTokens(before_N, rows.rollout_logprobs_N, rows.advantages_N, rows.segments_N)
                output = loss(logprobs_N, tokens)
                share = output.loss_N.sum() / normalizer
                share.backward()  # type: ignore[no-untyped-call]
                tally.add(share.detach(), output.metrics, (before_N - rows.rollout_logprobs_N).abs())

    def _update(self, tally: "_Tally") -> None:
        with tally.phase("optimizer"):
            parameters = [p for p in self.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            loss, grad_norm = float(tally.loss), float(norm)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                self.optimizer.zero_grad(set_to_none=True)
                raise TrainingError(
                    f"step {self.steps_done}: the loss is {loss} and the gradient norm {grad_norm}; the weights were "
                    f"left as they were (largest gap between engine and trainer: {float(tally.gap_max):.3g} nats)"
                )
            if self.config.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
            self.optimizer.step()
            tally.grad_norm = max(tally.grad_norm, grad_norm)

    def weights(self) -> Mapping[str, Tensor]:
        """The float32 weights themselves; of tied weights the first name only."""
        return named_weights(self.model)

    def save(self, folder: Path) -> None:
        state = {"step": self.steps_done, "optimizer": self.optimizer.state_dict()["state"]}
        save_checkpoint(folder, self.model, state, self.origin)

    def load(self, folder: Path) -> None:
        state = load_checkpoint(folder, self.model)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        self.steps_done = int(state["step"])

    def _precision(self) -> AbstractContextManager[object]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


@dataclass(slots=True)
class _Tally:
    """Sums over the loss tokens of a batch, kept on the device until the end."""

    loss: Tensor | float = 0.0
    gap_max: Tensor | float = 0.0
    grad_norm: float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, share: Tensor, metrics: Mapping[str, Tensor], gap_N: Tensor) -> None:
        """Count one micro-batch."""
        self.loss = share + self.loss
        self.gap_max = torch.clamp(gap_N.max(), min=self.gap_max)
        for name, values_N in {**metrics, "logprob_gap_mean": gap_N}.items():
            self.sums[name] = values_N.detach().sum() + self.sums.get(name, 0.0)

    def means(self, loss_tokens: int) -> dict[str, float]:
        """Each metric per loss token."""
        return {name: float(total) / loss_tokens for name, total in self.sums.items()}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of what happens inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'trainer.device {name!r} is no torch device: write "auto", "cpu" or "cuda:0"') from error


def _load_model(origin: Path, config: TrainerSettings, device: torch.device) -> Any:
    """The model in float32, without dropout: the logprobs must be those of the policy that sampled."""
    from transformers import AutoModelForCausalLM

    if not (origin / "config.json").is_file():
        raise ConfigError(f"{origin} is no Hugging Face model folder: there is no config.json in it")
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            origin, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    model.to(device).eval()
    check_model(model)
    if config.gradient_checkpointing:
        _without_dropout(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # checkpointing happens in training mode only
    return model


def _without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
