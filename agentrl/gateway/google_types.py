"""The parts of Google's requests that are read, as its clients send them.

The vendor's package describes what Python programs may pass, which is not what comes over HTTP, so
the types are here. Other fields of a content or a part are read over; those of a request are
checked by name.
"""

from typing import Any

from pydantic import ConfigDict
from typing_extensions import TypedDict


class FunctionCall(TypedDict, total=False):
    """A call of a tool, which the model has made. Many clients drop the id."""

    id: str
    name: str
    args: dict[str, Any]


class Blob(TypedDict, total=False):
    """Bytes in base64."""

    mimeType: str
    data: str


class FunctionResponsePart(TypedDict, total=False):
    """A picture that a tool has returned."""

    inlineData: Blob


class FunctionResponse(TypedDict, total=False):
    """What a tool has returned."""

    id: str
    name: str
    response: dict[str, Any]
    parts: list[FunctionResponsePart]


class ContentPart(TypedDict, total=False):
    """A piece of a content: a text, a picture, a call or a result."""

    text: str
    inlineData: Blob
    thought: bool
    functionCall: FunctionCall
    functionResponse: FunctionResponse


class Content(TypedDict, total=False):
    """A message."""

    role: str
    parts: list[ContentPart]


class FunctionDeclaration(TypedDict, total=False):
    """A tool. Its parameters are a JSON schema, or Google's own kind of schema."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    parametersJsonSchema: dict[str, Any] | None


class Tool(TypedDict, total=False):
    """Tools of the program's. Its other fields, which are tools of Google's own, stay in it."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    functionDeclarations: list[FunctionDeclaration] | None


class FunctionCallingConfig(TypedDict, total=False):
    """Whether the model may call tools."""

    mode: str


class ToolConfig(TypedDict, total=False):
    """How the model uses tools."""

    functionCallingConfig: FunctionCallingConfig


class GenerateContentRequest(TypedDict, total=False):
    """The body of `generateContent`, and what its path says of it: `model`, `stream`, `alt`."""

    contents: list[Content] | Content
    systemInstruction: Content
    tools: list[Tool]
    toolConfig: ToolConfig
    generationConfig: dict[str, Any]
    model: str
    stream: bool
    alt: str


class GenerationConfig(TypedDict, total=False):
    """The options of sampling."""

    maxOutputTokens: int
    temperature: float
    topP: float
    stopSequences: list[str]
    seed: int
    candidateCount: int
    responseMimeType: str
    responseSchema: dict[str, Any]
    responseJsonSchema: dict[str, Any]
