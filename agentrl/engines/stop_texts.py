"""Texts that end a completion (`SamplingParams.stop`), found in the tokens as they are sampled."""

from pathlib import Path

from agentrl.conversation.renderer import Tokenizer
from agentrl.errors import EngineError
from agentrl.models.tokenizer import load_tokenizer
from agentrl.protocols import GenerateRequest

_MARGIN = 4
"""Tokens decoded before the longest stop text: the first ones may be a part of a character."""


class StopTexts:
    """Watches the tokens of one completion. A text may end in the middle of a token, which is then
    the last one.
    """

    def __init__(self, tokenizer: Tokenizer, request: GenerateRequest) -> None:
        self._tokenizer = tokenizer
        self._texts = request.sampling.stop
        self._window = max(len(text.encode()) for text in self._texts) + _MARGIN
        self._tail = request.prompt_ids[len(request.prompt_ids) - request.resumed :].tolist()[
            -self._window :
        ]

    def ends(self, token: int) -> bool:
        """Add a token; True if the answer contains one of the texts now."""
        self._tail = [*self._tail, token][-self._window :]  # each token has at least one byte
        text = self._tokenizer.decode(self._tail, skip_special_tokens=False)
        return any(stop in text for stop in self._texts)


class FolderTokenizer:
    """The tokenizer of a model folder, loaded when a request first has stop texts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Tokenizer | None = None

    def stop_texts(self, request: GenerateRequest) -> StopTexts | None:
        """The watcher of the stop texts of a request, if it has some.

        Raises:
            EngineError: the folder has no tokenizer.
        """
        if not request.sampling.stop:
            return None
        if self._tokenizer is None:
            try:
                self._tokenizer = load_tokenizer(self._folder)
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"request {request.id} has the stop texts {list(request.sampling.stop)}, but"
                    f" the tokenizer of {self._folder} cannot be loaded: {error}. Write"
                    " rollout.sampling.stop_token_ids instead"
                ) from error
        return StopTexts(self._tokenizer, request)
