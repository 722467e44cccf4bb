"""`PreferenceCore`: what the recipe `reward_model` computes, in torch.

Dimension suffixes: B conversations, T tokens, P pairs.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from agentrl.algorithms.bradley_terry import preference_losses
from agentrl.errors import ConfigError, TrainingError
from agentrl.recipes.preferences import PreferencesConfig
from agentrl.tokens.arrays import IntArray

Pair = tuple[IntArray, IntArray]
"""The tokens of the chosen and of the rejected conversation."""


class PreferenceCore:
    """A sequence classifier with one output, and its optimizer. May be used from any thread, but
    one at a time.

    Raises:
        ConfigError: there is no classifier for such a model, or its tokenizer has no pad token.
    """

    def __init__(self, base: Path, config: PreferencesConfig, seed: int) -> None:
        self._config = config
        self._device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu")
            if config.device == "auto"
            else config.device
        )
        self._tokenizer = AutoTokenizer.from_pretrained(base)
        self._model = _load(base, self._tokenizer.pad_token_id, seed).to(self._device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, weight_decay=0.0
        )

    def step(self, pairs: Sequence[Pair], warmth: float) -> dict[str, float]:
        """Make one update at `warmth` (0 to 1) of the learning rate; metrics: mean loss in nats and
        accuracy before it.

        Raises:
            TrainingError: the loss or the gradient is not finite; the weights are then as they
            were.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = warmth * self._config.lr
        self._optimizer.zero_grad(set_to_none=True)
        loss, right = 0.0, 0
        for part in self._parts(pairs):
            chosen_P, rejected_P = self._scores(part)
            share = preference_losses(chosen_P, rejected_P).sum() / len(pairs)
            share.backward()  # type: ignore[no-untyped-call]
            loss += float(share.detach())
            right += int((chosen_P > rejected_P).sum())
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"the loss is {loss} and the gradient norm {norm}: lower recipe.preferences.lr"
            )
        self._optimizer.step()
        return {
            "loss": loss,
            "accuracy": right / len(pairs),
            "grad_norm": norm,
            "lr": warmth * self._config.lr,
        }

    def accuracy(self, pairs: Sequence[Pair]) -> float:
        """Share of pairs whose chosen conversation has the higher score."""
        with torch.no_grad():
            right = [self._scores(part) for part in self._parts(pairs)]
        return sum(int((chosen_P > rejected_P).sum()) for chosen_P, rejected_P in right) / len(
            pairs
        )

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder, with the tokenizer."""
        self._model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def _parts(self, pairs: Sequence[Pair]) -> list[Sequence[Pair]]:
        size = self._config.micro_batch_pairs
        return [pairs[start : start + size] for start in range(0, len(pairs), size)]

    def _scores(self, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """The scores of the chosen and the rejected, in one pass, so that randomness affects both
        alike.
        """
        sequences = [
            torch.tensor(ids, dtype=torch.long)
            for ids in (*(c for c, _ in pairs), *(r for _, r in pairs))
        ]
        tokens_BT = pad_sequence(
            sequences, batch_first=True, padding_value=self._model.config.pad_token_id
        )
        lengths_B = torch.tensor([len(sequence) for sequence in sequences])
        mask_BT = torch.arange(tokens_BT.shape[1])[None] < lengths_B[:, None]
        logits_B1 = self._model(
            input_ids=tokens_BT.to(self._device), attention_mask=mask_BT.to(self._device)
        ).logits
        chosen_P, rejected_P = logits_B1[:, 0].float().chunk(2)
        return chosen_P, rejected_P


def _load(base: Path, pad_token_id: int | None, seed: int) -> Any:
    """The classifier over the body of the causal model in `base`, with a new output layer from
    `seed`; no dropout.
    """
    config = AutoConfig.from_pretrained(base, num_labels=1)
    config.pad_token_id = config.pad_token_id if config.pad_token_id is not None else pad_token_id
    if config.pad_token_id is None:
        raise ConfigError(
            f"the tokenizer of {base} has no pad token, which tells a classifier where a text ends"
        )
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # no warning: a new output layer is what we want
    try:
        # Transformers draws new layers from torch's generator.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_pretrained(
                base, config=config, dtype=torch.float32
            )
    except ValueError as error:
        raise ConfigError(f"no reward model can be made from {base}: {error}") from error
    finally:
        logging.set_verbosity(before)
    return model.eval()
