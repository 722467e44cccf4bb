"""Settings of conversations: how they become tokens."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agentrl.settings.base import NameText, Settings


class RendererConfig(Settings):
    """The settings by which a model's conversations become tokens."""

    history: Literal["extend", "template"] = "extend"
    """`extend` shows the model all that it has written, reasoning included, and renders only what
    is new. `template` renders the whole conversation at every turn, as the model's chat template
    does: if that strips earlier reasoning, the conversation forks at every turn, and every prompt
    is computed again."""
    renderer: NameText = "auto"
    """The source of the rules. `template`: the model's chat template. A family of the library
    `renderers`, by its name (such as `qwen3`, `glm-4.5`, `gpt-oss`). `auto`: the family that writes
    the same tokens as the template, if there is one, else the template. Or another renderer, by the
    name of its plug-in or `package.module:Name`."""
    tool_format: NameText = "auto"
    """The format of calls of tools. `auto`: as the family or the template writes them. `canonical`:
    tools are described in the system message, and called as `<tool_call>{"name": ..., "arguments":
    ...}</tool_call>`. Or a registered format: those of the library `renderers` (`qwen3`, `qwen3.5`,
    `glm`, `deepseek-v3`), of other packages (entry-point group `agentrl.tool_formats`, or
    `package.module:Name`) or, where it is installed, of vLLM."""
    show_reasoning: bool = False
    """Leave reasoning in what environments and rewards get."""
    chat_template: Path | None = None
    """File of a chat template (Jinja) to use instead of the model's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking: false`."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. It can do whatever you can, so read it first,
    and name a `revision`."""
