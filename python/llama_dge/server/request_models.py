"""What clients send: OpenAI's request bodies as far as a local model can serve them, and llama.cpp's own fields.

Null stands for a field's default. A field that is not served is refused by name, or ignored where that is harmless; the
table in docs/server.md lists all of them.
"""
# ruff: noqa: UP006, UP007, UP035, UP045  # pydantic evaluates the types, on Python 3.9 as well

from __future__ import annotations

from typing import Any, ClassVar, Dict, List, Literal, Mapping, Optional, Union

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from . import bounds

_USER = "nobody is told apart here"
_STORED = "nothing is stored"
_HOSTED = "there is one way to be served"

#: Fields of OpenAI's API without an effect on a local model's answer.
IGNORED_CHAT = {
    "user": _USER,
    "safety_identifier": _USER,
    "metadata": _STORED,
    "store": _STORED,
    "service_tier": _HOSTED,
    "prompt_cache_key": "the cache finds earlier prompts by itself",
    "prompt_cache_options": "the cache finds earlier prompts by itself",
    "prompt_cache_retention": "the cache finds earlier prompts by itself",
    "prediction": "it could only make the same answer faster",
}
#: Fields that ask for what a local model cannot do.
REFUSED_CHAT = {
    "audio": "the model writes text only",
    "moderation": "there is no moderation here",
    "verbosity": "local models know no such setting; ask for a short answer in the prompt",
    "web_search_options": "the server does not search the web",
}
IGNORED_USER = {"user": _USER}


class Body(BaseModel):
    """An object of a request: null means the default, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
    ignored: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, reason in cls.refused.items():
            if data.get(name) is not None:
                raise PydanticCustomError(
                    "extra_forbidden", "{name} is not served: {reason}", {"name": name, "reason": reason}
                )
        return {name: value for name, value in data.items() if value is not None and name not in cls.ignored}


class Part(Body):
    """An object in which unknown fields are left out, such as a message that comes back from another client."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(Part):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="Send a last chunk with usage and no choices.")


class Generation(Body):
    """Fields that completions and chat completions share."""

    model: Optional[str] = Field(default=None, description="Alias of a model; another name gets the first one.")
    max_tokens: Optional[int] = Field(
        default=None, ge=-1, description="Tokens of the answer; -1: to the context's end."
    )
    min_tokens: int = Field(default=0, ge=0, description="Tokens before the answer may end.")
    temperature: float = Field(default=0.8, ge=0.0, le=100.0, description="0 takes the likeliest token.")
    top_p: float = Field(default=0.95, ge=0.0, le=1.0)
    min_p: float = Field(default=0.05, ge=0.0, le=1.0)
    top_k: int = Field(default=40, ge=0, le=2**31 - 1)
    repeat_penalty: float = Field(default=1.1, ge=0.0, le=100.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    mirostat_mode: int = Field(default=0, ge=0, le=2)
    mirostat_tau: float = Field(default=5.0, ge=0.0, le=10.0)
    mirostat_eta: float = Field(default=0.1, ge=0.001, le=1.0)
    seed: Optional[int] = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: List[str] = Field(default=[], description="Strings at which the answer ends; empty ones are left out.")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logit_bias: Dict[str, float] = Field(default={}, max_length=bounds.BIASES)
    logit_bias_type: Literal["input_ids", "tokens"] = "input_ids"
    grammar: Optional[str] = Field(default=None, max_length=bounds.GRAMMAR_LENGTH, description="GBNF of the answer.")
    n: int = Field(default=1, ge=1, le=bounds.ANSWERS, description="Answers to each prompt.")
    dge: Any = Field(
        default=None,
        description="Eviction for this request: false, true, the name of a preset, or an object of settings that "
        "differ from the server's.",
        json_schema_extra={"anyOf": [{"type": kind} for kind in ("boolean", "string", "object", "null")]},
    )

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stops_within(cls, value: List[str]) -> List[str]:
        value = [text for text in value if text]
        if len(value) > bounds.STOPS or any(len(text) > bounds.STOP_LENGTH for text in value):
            raise ValueError(f"at most {bounds.STOPS} strings of {bounds.STOP_LENGTH} characters each")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: Dict[str, float]) -> Dict[str, float]:
        for token, bias in value.items():
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"the bias of {token!r} is {bias}, and must be in -100 .. 100")
        return value


class CompletionRequest(Generation):
    """Body of a request for a completion."""

    ignored = IGNORED_USER

    # Any: pydantic would list the problems of each of the four types
    prompt: Any = Field(
        default=None,
        description="A text, token ids, or a list of either.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        },
    )
    max_tokens: Optional[int] = Field(default=16, ge=-1, description="Tokens of the answer; -1: to the context's end.")
    best_of: Optional[int] = Field(default=None, ge=1, le=bounds.ANSWERS, description="Answers of which n are sent.")
    echo: bool = Field(default=False, description="Send the prompt before the answer.")
    logprobs: Optional[int] = Field(default=None, ge=0, le=bounds.TOP_LOGPROBS)
    suffix: Optional[str] = Field(
        default=None, description="Text after the answer, for models that fill in the middle."
    )

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of={self.best_of}: must be at least n={self.n}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("best_of: cannot be streamed, as all answers have to be complete")
        n = len(self.prompts) * (self.best_of or self.n)
        if n > bounds.ANSWERS:
            raise ValueError(f"prompts times n (or best_of) are {n} answers, and a request may have {bounds.ANSWERS}")
        if self.suffix is not None and self.echo:
            raise ValueError("echo: cannot be combined with suffix")
        return self

    @property
    def prompts(self) -> List[Union[str, List[int]]]:
        """The prompts, each a text or token ids; raises ValueError for anything else, an empty one included."""
        if self.prompt in (None, "", []):
            if self.suffix:
                return [""]
            raise ValueError("prompt: is missing or empty; send a text or token ids")
        return _texts(self.prompt, "prompt")


def _texts(value: Any, name: str) -> List[Union[str, List[int]]]:
    """Return what may be a text, token ids, or a list of either, as a list; raises ValueError."""
    items = [value] if isinstance(value, str) or (value and _are_ids(value)) else value
    good = isinstance(items, list) and all(item and (isinstance(item, str) or _are_ids(item)) for item in items)
    if not good or not items:
        raise ValueError(f"{name}: must be a text, token ids, or a list of either, none of them empty")
    return items


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


class ImageURL(Part):
    """Where an image is."""

    url: str
    detail: str = "auto"


class ContentPart(Part):
    """A part of a message; texts are joined."""

    type: str
    text: Optional[str] = None
    refusal: Optional[str] = None
    image_url: Optional[Union[ImageURL, str]] = None


class FunctionCall(Part):
    """A function that the model called, with its arguments as JSON in a string."""

    name: str
    arguments: str = "{}"


class ToolCall(Part):
    """A call of a tool."""

    id: str = ""
    type: str = "function"
    function: FunctionCall


class Message(Part):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Optional[Union[str, List[ContentPart]]] = None
    name: Optional[str] = None
    tool_calls: List[ToolCall] = []
    function_call: Optional[FunctionCall] = None
    tool_call_id: Optional[str] = None


class Function(Part):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str = Field(min_length=1, max_length=256)
    description: Optional[str] = None
    parameters: Dict[str, Any] = {"type": "object", "properties": {}}
    strict: bool = False


class Tool(Part):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Part):
    """A function by name."""

    name: str


class NamedTool(Part):
    """A tool by name."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Part):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: List[NamedTool]


class AllowedToolsChoice(Part):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JSONSchema(Part):
    """A schema of the answer."""

    name: str = ""
    json_schema: Any = Field(default={}, alias="schema")
    strict: bool = False


class ResponseFormat(Part):
    """The form of the answer; ``"schema"`` beside ``"json_object"`` is llama-cpp-python's way to give one."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Optional[JSONSchema] = None
    bare_schema: Any = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema: is missing")
        return self


class ChatRequest(Generation):
    """Body of a request for a reply to messages."""

    ignored = IGNORED_CHAT
    refused = REFUSED_CHAT

    messages: List[Message] = Field(min_length=1)
    max_completion_tokens: Optional[int] = Field(default=None, ge=-1, description="As max_tokens, and goes before it.")
    tools: List[Tool] = Field(default=[], max_length=bounds.TOOLS)
    tool_choice: Optional[Union[Literal["none", "auto", "required"], NamedTool, AllowedToolsChoice]] = None
    parallel_tool_calls: bool = True
    functions: List[Function] = Field(default=[], max_length=bounds.TOOLS, description="Old name of tools.")
    function_call: Optional[Union[Literal["none", "auto"], FunctionName]] = Field(
        default=None, description="Old name of tool_choice."
    )
    response_format: Optional[ResponseFormat] = None
    logprobs: bool = False
    top_logprobs: Optional[int] = Field(default=None, ge=0, le=bounds.TOP_LOGPROBS)
    modalities: List[Literal["text"]] = ["text"]
    reasoning_effort: Optional[str] = Field(default=None, max_length=64, description="For templates that have it.")
    chat_template_kwargs: Dict[str, Any] = Field(default={}, description="Variables of the model's chat template.")

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}=0: must be at least 1, or -1 for the context's end")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs=true")
        return self


class EmbeddingRequest(Body):
    """Body of a request for embeddings."""

    ignored = IGNORED_USER

    model: Optional[str] = None
    input: Any = Field(
        description="A text, token ids, or a list of either.",
        json_schema_extra=CompletionRequest.model_fields["prompt"].json_schema_extra,
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Optional[int] = Field(default=None, description="Must be the model's own number.")

    @model_validator(mode="after")
    def _fits(self) -> EmbeddingRequest:
        _ = self.inputs
        return self

    @property
    def inputs(self) -> List[Union[str, List[int]]]:
        """The texts; raises ValueError as `CompletionRequest.prompts` does."""
        items = _texts(self.input, "input")
        if len(items) > bounds.EMBEDDINGS:
            raise ValueError(f"input: {len(items)} texts, and a request may have {bounds.EMBEDDINGS}")
        return items


class TokenizeRequest(Body):
    """Body of a request for tokens."""

    model: Optional[str] = None
    input: str


class DetokenizeRequest(Body):
    """Body of a request for the text of tokens."""

    model: Optional[str] = None
    tokens: List[int]
