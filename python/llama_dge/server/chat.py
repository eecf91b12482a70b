"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .answer import Piece, Token
from .engine import Loaded
from .errors import bad_request
from .generation import Header, Written, begin, respond, sampling_of
from .job import Work
from .json_grammar import JSON_OBJECT, SchemaError, schema_grammar
from .messages import for_template, has_images
from .prompts import check_length, check_text
from .request_models import AllowedToolsChoice, ChatRequest, Function, FunctionName, NamedTool
from .tools import Call, Format, Parser, call_grammar

PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class ToolUse:
    """Which functions the model may call, and how.

    Parameters
    ----------
    functions
        Those that it may.
    must
        Whether it has to.
    named
        Whether the client chose the one.
    """

    functions: tuple[Function, ...]
    must: bool = False
    named: bool = False


def tool_use(body: ChatRequest) -> ToolUse | None:
    """Return what a request says about tools, None where there are none or none may be called."""
    functions = [tool.function for tool in body.tools] or list(body.functions)
    choice: Any = body.function_call if body.functions and not body.tools else body.tool_choice
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise bad_request("tools: two functions have the same name", "tools")
    if isinstance(choice, (NamedTool, FunctionName)):
        name = choice.function.name if isinstance(choice, NamedTool) else choice.name
        if name not in names:
            raise bad_request(f"tool_choice: there is no function {name!r} in tools", "tool_choice")
        return ToolUse(tuple(f for f in functions if f.name == name), must=True, named=True)
    if not functions and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice: there are no tools", "tool_choice")
    if not functions or choice == "none":
        return None
    if isinstance(choice, AllowedToolsChoice):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        unknown = [name for name in allowed if name not in names]
        if unknown or not allowed:
            raise bad_request(f"tool_choice: there is no function {unknown} in tools", "tool_choice")
        some = tuple(f for f in functions if f.name in allowed)
        return ToolUse(some, must=choice.allowed_tools.mode == "required")
    return ToolUse(tuple(functions), must=choice == "required")


@dataclass(frozen=True)
class _Plan:
    """How an answer is written, and read again."""

    grammar: str | None = None
    use: ToolUse | None = None
    form: Format | None = None

    def parser(self) -> Parser | None:
        """Return a parser for the calls of one answer; None where there are none."""
        if self.use is None:
            return None
        return Parser(self.form, [function.name for function in self.use.functions])


def plan_of(loaded: Loaded, body: ChatRequest) -> _Plan:
    """Return how the answer is written; raises APIError where the model cannot."""
    if loaded.chat.driving:
        return _Plan()
    use = tool_use(body)
    kind = body.response_format.type if body.response_format is not None else "text"
    if body.grammar is not None and (kind != "text" or (use is not None and use.must)):
        raise bad_request(
            "grammar: cannot be combined with response_format, or with a tool that must be called", "grammar"
        )
    if use is None:
        return _Plan(_format_grammar(body))
    form = loaded.chat.tools
    if form is None and not use.named:
        raise bad_request(
            "tools: the chat template of this model has none, so it would not see them; name one function with "
            "tool_choice, or serve a model whose template has tools (or --chat-format chatml-function-calling)",
            "tools",
        )
    if not use.must:
        if kind != "text":
            raise bad_request(
                "response_format: cannot be combined with tools that the model may or may not call", "response_format"
            )
        return _Plan(None, use, form)
    try:
        grammar = call_grammar(form, use.functions, not use.named and body.parallel_tool_calls)
    except SchemaError as error:
        raise bad_request(f"tools: {error}", "tools") from error
    return _Plan(grammar, use, form)


def _format_grammar(body: ChatRequest) -> str | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    schema: Any = form.bare_schema if form.bare_schema is not None else JSON_OBJECT
    if form.type == "json_schema" and form.json_schema is not None:
        schema = form.json_schema.json_schema
    try:
        return schema_grammar(schema)
    except SchemaError as error:
        raise bad_request(f"response_format: the schema has no grammar: {error}", "response_format") from error


def work_of(loaded: Loaded, body: ChatRequest, plan: _Plan) -> Work:
    """Return what is to be written; raises APIError."""
    chat = loaded.chat
    if chat.driving:
        return _driven(loaded, body)
    shown = plan.use is not None and chat.tools is not None
    if has_images(body.messages) and body.n > 1:
        raise bad_request("n: one answer at a time to messages with images", "n")
    messages = for_template(body.messages, tools=chat.tools is not None, eyes=chat.eyes)
    if not has_images(body.messages):
        n_bytes = sum(len(message["content"].encode()) for message in messages)
        check_text(loaded.llm, n_bytes, loaded.n_ctx, "messages")
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    tools = (
        [
            {"type": "function", "function": f.model_dump(exclude={"strict"}, exclude_none=True)}
            for f in plan.use.functions
        ]
        if shown and plan.use
        else []
    )
    prompt = chat.render(messages, tools, variables)
    check_length(prompt, loaded.n_ctx, "messages")
    return Work(
        prompts=[prompt] * body.n,
        sampling=sampling_of(loaded, body, plan.grammar),
        max_tokens=_max_tokens(body),
        stops=tuple(body.stop),
        n_top=(body.top_logprobs or 0) if body.logprobs else None,
        special=plan.use is not None,
    )


def _driven(loaded: Loaded, body: ChatRequest) -> Work:
    """Return the arguments for a chat format that decodes by itself."""
    if body.n > 1 or body.logprobs or body.response_format is not None:
        raise bad_request("n, logprobs, response_format: not with this chat format, which decodes by itself")
    sampling = sampling_of(loaded, body, None)
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repeat_penalty",
        "stop",
    )
    arguments: dict[str, Any] = {"stop": body.stop, **{name: getattr(body, name) for name in names}}
    for name in ("messages", "tools", "functions"):
        arguments[name] = [item.model_dump(exclude_none=True) for item in getattr(body, name)] or None
    for name in ("tool_choice", "function_call"):
        choice = getattr(body, name)
        arguments[name] = choice.model_dump() if isinstance(choice, (NamedTool, FunctionName)) else choice
    arguments.update(seed=body.seed, max_tokens=_max_tokens(body), logit_bias=dict(sampling.logit_bias) or None)
    return Work([], sampling, None, driven=arguments)


def _max_tokens(body: ChatRequest) -> int | None:
    value = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return None if value == -1 else value


class _Reply:
    """Makes messages, and deltas of a stream, of one answer."""

    def __init__(self, body: ChatRequest, plan: _Plan) -> None:
        self._legacy = bool(body.functions) and not body.tools
        self._single = not body.parallel_tool_calls
        self._parser = plan.parser()
        self.n_calls = 0

    def parts(self, text: str, finish: str | None) -> list[str | Call]:
        """Return what a piece of the answer adds: texts and calls."""
        if self._parser is None:
            return [text] if text else []
        parts = list(self._parser.feed(text))
        if finish is not None:
            parts += self._parser.end()
        if self._single:
            calls = [part for part in parts if isinstance(part, Call)][: max(0, 1 - self.n_calls)]
            parts = [part for part in parts if isinstance(part, str) or part in calls]
        self.n_calls += sum(isinstance(part, Call) for part in parts)
        return parts

    def delta(self, part: str | Call, index: int) -> dict[str, Any]:
        """Return the delta of a part; `index` counts calls."""
        if isinstance(part, str):
            return {"content": part}
        if self._legacy:
            return {"function_call": _function(part)}
        return {"tool_calls": [{"index": index, **_tool_call(part)}]}

    def message(self, parts: list[str | Call]) -> dict[str, Any]:
        """Return the message of a complete answer."""
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls and self._legacy:
            message["function_call"] = _function(calls[0])
        elif calls:
            message["tool_calls"] = [_tool_call(call) for call in calls]
        return message

    def finish(self, reason: str) -> str:
        """Return why the answer ends."""
        if self.n_calls and reason == "stop":
            return "function_call" if self._legacy else "tool_calls"
        return reason


def _function(call: Call) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _tool_call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": _function(call)}


def _as_delta(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or [])]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _logprobs(body: ChatRequest, tokens: list[Token]) -> dict[str, Any] | None:
    if not body.logprobs:
        return None

    def entry(data: bytes, value: float) -> dict[str, Any]:
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": value}

    content = [
        {**entry(token.data, token.logprob or 0.0), "top_logprobs": [entry(data, value) for data, value in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _choice(body: ChatRequest, plan: _Plan, index: int, answer: Written) -> dict[str, Any]:
    reply = _Reply(body, plan)
    message = answer.message or reply.message(reply.parts(answer.text, answer.finish))
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(body, answer.tokens),
        "finish_reason": reply.finish(answer.finish),
    }


async def _chunks(
    header: Header, body: ChatRequest, plan: _Plan, pieces: AsyncIterator[Piece], usage: Any
) -> AsyncIterator[dict[str, Any]]:
    replies: dict[int, _Reply] = {}

    def chunk(index: int, delta: dict[str, Any], tokens: list[Token] | None, finish: str | None) -> dict[str, Any]:
        logprobs = _logprobs(body, tokens) if tokens else None
        return header.body([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}])

    async for piece in pieces:
        index = piece.index
        if index not in replies:
            replies[index] = _Reply(body, plan)
            yield chunk(index, {"role": "assistant", "content": ""}, None, None)
        reply = replies[index]
        if piece.message is not None:
            yield chunk(index, _as_delta(piece.message), None, piece.finish)
            continue
        n_calls = reply.n_calls
        tokens: list[Token] | None = piece.tokens
        parts = reply.parts(piece.text, piece.finish)
        if not parts and tokens:
            parts = [""]  # tokens of text that is held back
        for part in parts:
            yield chunk(index, reply.delta(part, n_calls), tokens, None)
            n_calls += isinstance(part, Call)
            tokens = None
        if piece.finish is not None:
            yield chunk(index, {}, None, reply.finish(piece.finish))
    if body.stream_options.include_usage:
        yield header.body([], usage=usage())


async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Reply to messages."""
    plans: list[_Plan] = []

    def prepare(loaded: Loaded) -> Work:
        plans[:] = [plan_of(loaded, body)]
        return work_of(loaded, body, plans[0])

    job = await begin(request, body, prepare)
    model = body.model or job.alias
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    header = Header(kind, "chatcmpl", model)
    return await respond(
        request,
        body,
        job,
        lambda pieces: _chunks(header, body, plans[0], pieces, job.usage.body),
        lambda answers: header.body(
            [_choice(body, plans[0], i, answer) for i, answer in enumerate(answers)], usage=job.usage.body()
        ),
    )


def add_routes(router: APIRouter, **options: Any) -> None:
    """Add the route to a router."""
    router.add_api_route(
        PATH,
        create_chat_completion,
        methods=["POST"],
        response_model=None,
        responses={200: {"description": "A chat completion, whose usage has dge. With stream, its chunks as events."}},
        **options,
    )
