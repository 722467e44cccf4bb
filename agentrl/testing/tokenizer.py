"""A tokenizer that needs no model: its tokens are the bytes of UTF-8."""

from typing import Any

END = "\x03"


class ByteTokenizer:
    """One token per byte; `END` (byte 3) ends a turn. With it, `TemplateRenderer` runs without
    transformers.

    `forgets_thoughts=True` behaves like templates that drop `<think>...</think>` from earlier
    assistant turns, which makes a conversation fork.
    """

    chat_template = "{role}:{content}" + END
    eos_token_id: int | None = ord(END)

    def __init__(self, *, forgets_thoughts: bool = False) -> None:
        self._forgets_thoughts = forgets_thoughts

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text."""
        if tokenize:
            raise ValueError("ByteTokenizer renders text only: pass tokenize=False")
        text = f"tools:{tools}{END}" if tools else ""
        for message in conversation:
            content = message["content"]
            if self._forgets_thoughts and message["role"] == "assistant":
                content = content.split("</think>")[-1]
            text += f"{message['role']}:{content}{END}"
        return text + ("assistant:" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Bytes; there are no special tokens to add."""
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text; bytes that are not UTF-8 become the replacement character."""
        kept = [i for i in token_ids if not (skip_special_tokens and i == self.eos_token_id)]
        return bytes(kept).decode(errors="replace")
