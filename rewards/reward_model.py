"""`RewardModel`: a trained classifier scores trajectories."""

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError, RewardError
from agentrl.models.optional_fields import optional_field
from agentrl.settings.base import Settings
from agentrl.tokens.arrays import IntArray
from agentrl.trajectory import Score, Trajectory


class _Waiting(NamedTuple):
    token_ids: IntArray
    score: "asyncio.Future[float]"


class RewardModel:
    """The output of a Hugging Face sequence classifier with one label, over the whole conversation,
    as a reward.

    It computes in its own thread; conversations that arrive meanwhile form the next batch. The
    recipe `reward_model` trains such models; a model from elsewhere needs a tokenizer with a chat
    template and a pad token. An async context manager.

    Raises:
        ConfigError: on entering: the folder has no such model.
    """

    class Config(Settings):
        """Settings of `reward_model`."""

        path: Path
        """The model's folder."""
        batch: int = Field(default=16, gt=0)
        """Most conversations that go through the model at once."""
        device: str = "auto"
        """A torch device, or "auto": the first GPU, else the CPU."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model: Any = None
        self._renderer: TemplateRenderer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._queue: deque[_Waiting] = deque()
        self._busy = False
        self._scored = self._batches = 0

    async def __aenter__(self) -> Self:
        if not (self._config.path / "config.json").is_file():
            raise ConfigError(
                f"the reward model {self._config.path} is no Hugging Face folder: no config.json"
                " in it"
            )
        self._renderer = TemplateRenderer.of_model(self._config.path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        loop = asyncio.get_running_loop()
        try:
            self._model = await loop.run_in_executor(
                self._thread, _load, self._config.path, self._config.device
            )
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        thread, self._thread, self._model = self._thread, None, None
        for waiting in self._queue:
            waiting.score.cancel()
        self._queue.clear()
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)

    async def score(self, trajectory: Trajectory) -> Score:
        """The model's score of the conversation.

        Raises:
            RewardError: the conversation is longer than the model can read, or the model failed or
                computed no finite number.
        """
        if self._renderer is None or self._model is None:
            raise ConfigError("the reward model is not running: use it inside `async with reward:`")
        token_ids = self._renderer.encode_conversation(trajectory.messages)
        longest = optional_field(self._model.config, "max_position_embeddings")
        if longest is not None and len(token_ids) > longest:
            raise RewardError(
                f"the conversation has {len(token_ids)} tokens; the reward model reads at most"
                f" {longest}"
            )
        waiting = _Waiting(token_ids, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._start_batch()
        score = await waiting.score
        if not math.isfinite(score):
            raise RewardError(f"the reward model computed {score}, which is no score")
        return Score(score)

    def metrics(self) -> Mapping[str, float]:
        """Conversations scored since the last call, and their mean batch size."""
        scored, batches = self._scored, self._batches
        self._scored = self._batches = 0
        return {"scored": float(scored), "batch_mean": scored / max(1, batches)}

    def _start_batch(self) -> None:
        """Start the next batch, unless the thread is busy."""
        batch: list[_Waiting] = []
        while self._queue and not self._busy and len(batch) < self._config.batch:
            waiting = self._queue.popleft()
            if not waiting.score.done():  # its trajectory may have been dropped meanwhile
                batch.append(waiting)
        if not batch:
            return
        self._busy = True
        self._batches += 1
        self._scored += len(batch)
        ids = [waiting.token_ids for waiting in batch]
        working = asyncio.get_running_loop().run_in_executor(
            self._thread, _compute_scores, self._model, ids
        )
        working.add_done_callback(lambda done: self._give_scores(batch, done))

    def _give_scores(self, batch: Sequence[_Waiting], done: "asyncio.Future[list[float]]") -> None:
        """Tell those that wait what the thread has computed, and start the next batch."""
        self._busy = False
        error = None if done.cancelled() else done.exception()
        for place, waiting in enumerate(batch):
            if waiting.score.done():
                continue
            if done.cancelled():
                waiting.score.cancel()
            elif error is not None:
                waiting.score.set_exception(
                    RewardError(f"the reward model: {type(error).__name__}: {error}")
                )
            else:
                waiting.score.set_result(done.result()[place])
        if self._thread is not None:  # else the reward has been left meanwhile
            self._start_batch()


def _load(folder: Path, device: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(folder)
    kinds = [
        kind for kind in config.architectures or () if kind.endswith("ForSequenceClassification")
    ]
    if not kinds or config.num_labels != 1 or config.pad_token_id is None:
        raise ConfigError(
            f"{folder} is {config.architectures} with {config.num_labels} labels and the pad token"
            f" {config.pad_token_id}; a reward model is a ...ForSequenceClassification with one"
            " label and a pad token (the recipe reward_model trains one)"
        )
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model.eval().to(chosen)


def _compute_scores(model: Any, sequences: Sequence[IntArray]) -> list[float]:
    """One output for each token sequence. The padding at the end changes only the last digits."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tokens_BT = pad_sequence(
        [torch.tensor(ids, dtype=torch.long) for ids in sequences],
        batch_first=True,
        padding_value=model.config.pad_token_id,
    )
    lengths_B = torch.tensor([len(ids) for ids in sequences])
    mask_BT = torch.arange(tokens_BT.shape[1])[None] < lengths_B[:, None]
    with torch.inference_mode():
        logits_B1 = model(
            input_ids=tokens_BT.to(model.device), attention_mask=mask_BT.to(model.device)
        ).logits
    scores: list[float] = logits_B1[:, 0].float().tolist()
    return scores
