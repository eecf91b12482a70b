"""Prompts: what a chat format makes of messages, and the tokens of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
from llama_cpp import llama_chat_format
from llama_cpp.llama_tokenizer import LlamaTokenizer

from .._pieces import join
from .errors import APIError, bad_request, context_exceeded
from .settings import ModelSettings
from .tools import HEADING, Format, format_of

#: Formats that decode several times for one answer, and so keep the model to themselves.
DRIVING = ("functionary", "functionary-v1", "functionary-v2")
_TOOL_USE = "chat_template.tool_use"
#: Arguments of chat formats that are no variables of a template.
_RESERVED = ("llama", "messages", "tools", "functions", "function_call", "tool_choice", "eos_token", "bos_token")


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Parameters
    ----------
    tokens
        Its tokens.
    text
        What it was made of, for `echo`.
    stops
        Strings with which the format has answers end.
    """

    tokens: list[int]
    text: str = ""
    stops: tuple[str, ...] = ()


class _Recorded(Exception):
    def __init__(self, prompt: Any, stop: Any) -> None:
        self.prompt = prompt
        self.stop = stop


class _Recorder:
    """Stands for the model where a chat format would have it answer, and notes with which prompt."""

    def __init__(self, llm: Any) -> None:
        object.__setattr__(self, "_llm", llm)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._llm, name, value)  # handlers of images set n_tokens

    def create_completion(self, prompt: Any, stop: Any = None, **_: Any) -> Any:
        raise _Recorded(prompt, stop)


class ChatFormat:
    """The chat format of a model.

    Attributes
    ----------
    eyes
        Whether it takes images. Such a format evaluates the prompt itself.
    driving
        Whether it decodes several times for one answer.
    tools
        How calls of tools are written, None where the template has no tools.
    """

    def __init__(self, llm: Any, settings: ModelSettings) -> None:
        name = llm.chat_format
        self._llm = llm
        self._handler = (
            llm.chat_handler or llm._chat_handlers.get(name) or llama_chat_format.get_chat_completion_handler(name)
        )
        self._fixed = dict(settings.chat_template_kwargs or {})
        kinds = (llama_chat_format.Llava15ChatHandler, llama_chat_format.MTMDChatHandler)
        self.eyes = isinstance(self._handler, kinds)
        self.driving = llm.chat_handler is None and name in DRIVING
        self._for_tools = self._handler
        template = _template(llm, settings)
        self.tools: Format | None = format_of(template) if template is not None else None
        if self.tools is None and _TOOL_USE in llm._chat_handlers and llm.chat_handler is None:
            self._for_tools = llm._chat_handlers[_TOOL_USE]
            self.tools = format_of(llm.metadata["tokenizer." + _TOOL_USE])
        if llm.chat_handler is None and name == "chatml-function-calling":
            self.tools = HEADING

    def render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Prompt:
        """Return the prompt of messages.

        Parameters
        ----------
        messages
            As `messages.for_template` makes them.
        tools
            Those that the model may call.
        variables
            Of the template.

        Raises
        ------
        APIError
            The template refuses the messages; its own words are passed on.
        """
        reserved = [name for name in variables if name in _RESERVED]
        if reserved:
            raise bad_request(f"chat_template_kwargs: {', '.join(reserved)}: set by the server", "chat_template_kwargs")
        handler: Any = self._for_tools if tools else self._handler
        given = {"tools": list(tools), "tool_choice": "auto"} if tools else {}
        try:
            handler(llama=_Recorder(self._llm), messages=messages, **{**self._fixed, **variables}, **given)
        except _Recorded as recorded:
            stops = recorded.stop if isinstance(recorded.stop, list) else [recorded.stop or ""]
            if self.tools is HEADING:
                stops = ["<|im_end|>"]  # the format asks for a heading first
            prompt = recorded.prompt
            tokens = tokenize(self._llm, prompt) if isinstance(prompt, str) else list(prompt)
            return Prompt(tokens, stops=tuple(stop for stop in stops if stop))
        except (APIError, UnicodeEncodeError):
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) or type(error).__name__ == "Gone":
                raise
            raise bad_request(
                f"messages: the chat template of this model refuses them: {type(error).__name__}: {error}", "messages"
            ) from error
        raise RuntimeError(f"the chat format {self._llm.chat_format} asked for no answer")


def _template(llm: Any, settings: ModelSettings) -> str | None:
    if settings.hf_tokenizer_config_path is not None and settings.chat_format == "hf-tokenizer-config":
        with open(settings.hf_tokenizer_config_path, encoding="utf-8") as file:
            return str(json.load(file)["chat_template"])
    if llm.chat_handler is None and not str(llm.chat_format).startswith("chat_template."):
        return None
    name = str(llm.chat_format or "chat_template.default").removesuffix(".default")
    found = llm.metadata.get(f"tokenizer.{name}")
    return str(found) if found is not None else None


def tokenize(llm: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, with the marks of beginning and end that the model asks for."""
    model = llm._model
    begin, end = model.token_cls(), model.token_sep()
    begin = begin if begin != -1 else llm.token_bos()
    end = end if end != -1 else llm.token_eos() if model.add_eos_token() else -1
    tokens = llm.tokenize(text.encode(), add_bos=False, special=True)
    before = [begin] if model.add_bos_token() and begin != -1 else []
    return [*before, *tokens, *([end] if end != -1 else [])]


def text_prompt(llm: Any, prompt: str | list[int], suffix: str | None = None) -> Prompt:
    """Return the prompt of a completion; raises APIError for ids that the model does not have.

    Parameters
    ----------
    llm
        The model.
    prompt
        A text, or token ids, which are taken as they are.
    suffix
        Text after the answer, for a model that fills in the middle.
    """
    if not isinstance(prompt, str):
        n_vocab = llm.n_vocab()
        bad = [token for token in prompt if not 0 <= token < n_vocab]
        if bad:
            raise bad_request(f"prompt: {bad[0]} is no token id: they are 0 .. {n_vocab - 1}", "prompt")
    if suffix is not None:
        return Prompt(_fill_in(llm, prompt, suffix))
    if isinstance(prompt, str):
        return Prompt(tokenize(llm, prompt), prompt)
    return Prompt(list(prompt), join(llm._model.vocab, prompt).decode("utf-8", "replace"))


def _fill_in(llm: Any, prefix: str | list[int], suffix: str) -> list[int]:
    vocab = llm._model.vocab
    pre, suf, mid = (getattr(llama_cpp, f"llama_vocab_fim_{name}")(vocab) for name in ("pre", "suf", "mid"))
    if -1 in (pre, suf, mid):
        raise bad_request("suffix: this model has no tokens for filling in the middle", "suffix")

    def tokens(text: str | list[int]) -> list[int]:
        return text if isinstance(text, list) else llm.tokenize(text.encode(), add_bos=False, special=False)

    before, after = [pre, *tokens(prefix)], [suf, *tokens(suffix)]
    body = [*after, *before] if llm.spm_infill else [*before, *after]
    begin = [llm.token_bos()] if llm._model.add_bos_token() and llm.token_bos() != -1 else []
    return [*begin, *body, mid]


def check_length(prompt: Prompt, n_ctx: int, param: str) -> None:
    """Raise APIError where a prompt leaves no room for an answer."""
    if len(prompt.tokens) >= n_ctx:
        raise context_exceeded(len(prompt.tokens), n_ctx, param)


def check_text(llm: Any, n_bytes: int, n_ctx: int, param: str) -> None:
    """Raise APIError where a text is too long for the context whatever its tokens are, without looking for them."""
    if n_bytes <= 32 * n_ctx + 4096 or not isinstance(llm.tokenizer_, LlamaTokenizer):
        return
    most = max(len(llama_cpp.llama_vocab_get_text(llm._model.vocab, i)) for i in range(llm.n_vocab()))
    if n_bytes > most * n_ctx:
        raise context_exceeded(-(-n_bytes // most), n_ctx, param)
