"""The application: llama-cpp-python's, with routes of its own for completions and for ``/metrics``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Dict, Optional  # noqa: UP035  # pydantic evaluates them, on Python 3.9 as well

import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from llama_cpp.server import app as stock
from llama_cpp.server import errors, types
from pydantic import BaseModel, Field
from sse_starlette.sse import EventSourceResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import model as served
from . import settings as ours

_COMPLETIONS = ("/v1/completions", "/v1/engines/copilot-codex/completions")
_CHAT = "/v1/chat/completions"


class StreamOptions(BaseModel):
    """Options of a stream, as OpenAI's API has them."""

    include_usage: bool = Field(default=False, description="Send a last chunk with usage and no choices.")


class _Extension(BaseModel):
    # not among the arguments of the model's methods
    dge: Any = Field(
        default=None,
        exclude=True,
        description="Eviction for this request: false, true, or an object of settings that differ from the server's.",
        json_schema_extra={"anyOf": [{"type": "boolean"}, {"type": "object"}]},
    )
    stream_options: Optional[StreamOptions] = Field(default=None, exclude=True)  # noqa: UP045


class CompletionRequest(types.CreateCompletionRequest, _Extension):
    """Body of a request for a completion."""


class ChatCompletionRequest(types.CreateChatCompletionRequest, _Extension):
    """Body of a request for a reply to messages."""


class ErrorHandler(errors.RouteErrorHandler):
    """Answers a bad request with status 400, where the stock handler takes it for an error of the server."""

    def error_message_wrapper(self, error: Exception, body: Any = None) -> tuple[int, errors.ErrorResponse]:
        """Return the status and an error as OpenAI's API has it."""
        if isinstance(error, ours.BadOverride):
            return 400, _invalid(str(error), "dge")
        if isinstance(error, RequestValidationError):
            problems = [f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors()]
            return 400, _invalid("; ".join(problems), None)
        if isinstance(error, served.Gone):
            return 503, {"message": str(error), "type": "cancelled", "param": None, "code": None}
        status, answer = super().error_message_wrapper(error, body)
        # llama_cpp.Llama's way to refuse a parameter
        refused = isinstance(error, ValueError) and not isinstance(error, UnicodeError)
        if status >= 500 and refused:
            return 400, _invalid(str(error), None)
        return status, answer


def _invalid(message: str, param: str | None) -> errors.ErrorResponse:
    return {"message": message, "type": "invalid_request_error", "param": param, "code": None}


class Watch:
    """Gives each request for a completion its `Request`, and tells it when the client goes away."""

    def __init__(self, app: ASGIApp, service: served.Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))  # a proxy's prefix
        if scope["type"] != "http" or scope["method"] != "POST" or path not in (*_COMPLETIONS, _CHAT):
            await self._app(scope, receive, send)
            return
        request = served.Request(self._service)

        def stopped() -> bool:
            return request.gone.is_set() or self._service.stopping.is_set()

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                request.gone.set()
            return message

        async def watched_send(message: Message) -> None:
            if message.get("status", 200) >= 400 and not stopped():
                request.finish("error")  # before the client knows
            await send(message)

        token = served.current.set(request)
        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            served.current.reset(token)
            request.finish("cancelled")  # unless it is counted
            request.gone.set()  # ends what a thread may still be doing for it


async def _until_gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)


async def _complete(
    route: Callable[..., Awaitable[Any]], method: Callable[..., Any], request: Request, body: Any
) -> Any:
    """Have the stock route answer a request."""
    mine = served.current.get()
    assert mine is not None  # Watch has set it
    if mine.service.proxy is not None:
        ours.request_config(mine.service.proxy.config(body.model), body.dge)  # raises before the status is sent
    mine.override = body.dge
    mine.include_usage = body.stream_options is not None and body.stream_options.include_usage
    # a stream looks for itself whether the client is there
    watcher = None if body.stream else asyncio.create_task(_until_gone(request))
    try:
        answer = await route(request, body)
    finally:
        if watcher is not None:
            watcher.cancel()
    if isinstance(answer, EventSourceResponse) and answer.data_sender_callable is not None:
        # the stock route would call the method of llama_cpp.Llama
        sender: Callable[..., Any] = answer.data_sender_callable
        answer.data_sender_callable = functools.partial(sender, llama_call=method)
    return answer


def _answer_schema(name: str) -> dict[int | str, Dict[str, Any]]:  # noqa: UP006
    text = f"{name}, whose usage has dge: rows_before, rows_kept, rows_restored, n_refresh and more."
    return {200: {"description": f"{text} With stream, its chunks as events."}}


def _router(service: served.Service) -> APIRouter:
    router = APIRouter(route_class=ErrorHandler)
    checked = [Depends(stock.authenticate)]

    async def create_completion(request: Request, body: CompletionRequest) -> Any:
        if isinstance(body.prompt, list) and len(body.prompt) > 1:
            raise ValueError(f"prompt: {len(body.prompt)} texts were given; send a request for each")
        return await _complete(stock.create_completion, served.Served.create_completion, request, body)

    async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Any:
        return await _complete(stock.create_chat_completion, served.Served.create_chat_completion, request, body)

    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    def add(path: str, endpoint: Callable[..., Any], **kwargs: Any) -> None:
        router.add_api_route(path, endpoint, dependencies=list(checked), response_model=None, **kwargs)

    for path in _COMPLETIONS:
        add(
            path,
            create_completion,
            methods=["POST"],
            responses=_answer_schema("A completion"),
            tags=[stock.openai_v1_tag],
            include_in_schema=path == _COMPLETIONS[0],
        )
    add(
        _CHAT,
        create_chat_completion,
        methods=["POST"],
        responses=_answer_schema("A chat completion"),
        tags=[stock.openai_v1_tag],
    )
    add("/metrics", metrics, methods=["GET"], tags=[stock.extras_tag])
    mine = {getattr(route, "path", None) for route in router.routes}
    router.routes.extend(route for route in stock.router.routes if getattr(route, "path", None) not in mine)
    return router


def create_app(
    settings: ours.Settings | None = None,
    server_settings: ours.ServerSettings | None = None,
    model_settings: Sequence[ours.ModelSettings] | None = None,
) -> FastAPI:
    """Create the application and load the first model.

    Parameters
    ----------
    settings
        Of a server with one model. None: those of the environment, or of the file that ``CONFIG_FILE`` names.
    server_settings, model_settings
        In place of `settings`, for several models.

    Returns
    -------
    FastAPI
        One per process. It frees the model when it is shut down.

    Raises
    ------
    ValueError
        A setting is wrong, or a model cannot be loaded or cut.
    """
    service = served.Service()
    with served.replaced(
        stock,
        Settings=ours.Settings,
        ServerSettings=ours.ServerSettings,
        ModelSettings=ours.ModelSettings,
        ConfigFileSettings=ours.ConfigFileSettings,
        LlamaProxy=functools.partial(served.Proxy, service),
        router=_router(service),
    ):
        models: Any = None if model_settings is None else list(model_settings)
        app: FastAPI = stock.create_app(settings, server_settings, models)  # type: ignore[arg-type]
    app.add_middleware(Watch, service=service)
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with inner(app) as state:
            yield state
        await anyio.to_thread.run_sync(service.close)

    app.router.lifespan_context = lifespan
    app.state.llama_dge = service
    return app
