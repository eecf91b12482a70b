"""The application: its routes, what stands before all of them, and how it begins and ends."""

from __future__ import annotations

import contextlib
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Optional

import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import bounds, chat, completions, errors, other_routes
from .engine import Engine
from .errors import APIError
from .settings import ModelSettings, ServerSettings, Settings, resolve

_bearer = HTTPBearer(auto_error=False)


async def authenticate(
    request: Request,
    given: Optional[HTTPAuthorizationCredentials] = Depends(_bearer),  # noqa: B008, UP045
) -> None:
    """Raise APIError where the server has a key and the request another one, or none."""
    key = request.app.state.engine.settings.api_key
    if key is None:
        return
    if given is None or not hmac.compare_digest(given.credentials.encode(), key.encode()):
        raise APIError(401, "Invalid API key", None, "invalid_api_key")


class Outer:
    """Gives each answer an id and its time, and refuses bodies that are too large."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        given = dict(scope["headers"]).get(b"x-request-id", b"")[:128]
        n_bytes = 0

        async def counted() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > bounds.BODY_BYTES:
                raise HTTPException(413, f"the body has more than {bounds.BODY_BYTES} bytes")  # FastAPI passes it on
            return message

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                ms = int((time.perf_counter() - start) * 1000)
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", given or uuid.uuid4().hex.encode()),
                    (b"openai-processing-ms", str(ms).encode()),
                ]
            await send(message)

        await self._app(scope, counted, named)


def create_app(
    settings: Settings | None = None,
    server_settings: ServerSettings | None = None,
    model_settings: Sequence[ModelSettings] | None = None,
) -> FastAPI:
    """Create the server's application; the first model is loaded.

    Parameters
    ----------
    settings
        Of a server with one model. None: those of the environment, or of the file that ``CONFIG_FILE`` names.
    server_settings, model_settings
        In place of `settings`, for several models.

    Returns
    -------
    FastAPI
        It frees the model when it is shut down; ``state.engine`` is the part that answers.

    Raises
    ------
    ValueError
        A setting is wrong, or a model cannot be loaded or evicted.
    """
    server, models = resolve(settings, server_settings, model_settings)
    engine = Engine(server, models)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await anyio.to_thread.run_sync(engine.close)

    app = FastAPI(title="llama-dge", version="1", root_path=server.root_path, lifespan=lifespan)
    app.state.engine = engine
    checked: Any = [Depends(authenticate)]
    router = APIRouter(dependencies=checked)
    open_router = APIRouter()
    completions.add_routes(router)
    chat.add_routes(router)
    other_routes.add_routes(router, open_router)
    app.include_router(router)
    app.include_router(open_router)
    errors.install(app, engine.metrics, (chat.PATH, *completions.PATHS))
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_credentials=True, allow_methods=["*"], allow_headers=["*"]
    )
    app.add_middleware(Outer)
    return app
