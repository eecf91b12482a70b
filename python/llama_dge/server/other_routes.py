"""The small routes: models, embeddings, tokens, health and metrics."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from .engine import Loaded
from .errors import APIError, bad_request, context_exceeded
from .generation import client_of, engine_of
from .prompts import check_text, text_prompt
from .request_models import DetokenizeRequest, EmbeddingRequest, TokenizeRequest


def _model(alias: str) -> dict[str, Any]:
    return {"id": alias, "object": "model", "created": 0, "owned_by": "llama-dge"}


async def list_models(request: Request) -> dict[str, Any]:
    """List the models."""
    return {"object": "list", "data": [_model(alias) for alias in engine_of(request).models]}


async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """Describe a model."""
    if model not in engine_of(request).models:
        raise APIError(404, f"there is no model {model!r}", "model", "model_not_found")
    return _model(model)


async def health(request: Request) -> Response:
    """Say whether the server takes requests; it needs no key."""
    status = engine_of(request).status
    return JSONResponse(status, status_code=200 if status["status"] == "ok" else 503)


async def metrics(request: Request) -> Response:
    """Return counters in Prometheus' text format."""
    engine = engine_of(request)
    status = engine.status
    engine.metrics.set(requests_running=status["running"], requests_waiting=status["waiting"])
    return PlainTextResponse(engine.metrics.text(), media_type="text/plain; version=0.0.4")


async def create_embedding(request: Request, body: EmbeddingRequest) -> dict[str, Any]:
    """Return vectors of length 1 for texts; where the model does not pool, the mean of its tokens' vectors."""
    inputs = body.inputs

    def embed(loaded: Loaded) -> tuple[list[Any], int]:
        llm = loaded.llm
        if not loaded.settings.embedding:
            raise bad_request(
                "this model answers prompts and makes no embeddings; serve one with embedding=true "
                "(llama-dge serve --set embedding=true)",
                "model",
            )
        if body.dimensions not in (None, llm.n_embd()):
            raise bad_request(f"dimensions: this model's vectors have {llm.n_embd()}", "dimensions")
        vectors, n_tokens = [], 0
        for text in inputs:
            if isinstance(text, str):
                check_text(llm, len(text.encode()), llm.n_batch, "input")
            tokens = text_prompt(llm, text).tokens
            if len(tokens) > llm.n_batch:
                raise context_exceeded(len(tokens), llm.n_batch, "input")
            n_tokens += len(tokens)
            vectors.append(llm.embed_tokens(tokens))
        return vectors, n_tokens

    vectors, n_tokens = await engine_of(request).call(client_of(request), body.model, embed)
    if body.encoding_format == "base64":
        vectors = [base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode() for vector in vectors]
    return {
        "object": "list",
        "data": [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)],
        "model": body.model or engine_of(request).default,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }


async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Return the tokens of a text."""
    data = body.input.encode()
    tokens = await _beside(request, body.model, lambda loaded: loaded.llm.tokenize(data, special=True))
    return {"tokens": tokens}


async def count_tokens(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Return the number of tokens of a text."""
    return {"count": len((await tokenize(request, body))["tokens"])}


async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    """Return the text of tokens."""
    if not body.tokens:
        return {"text": ""}
    prompt = await _beside(request, body.model, lambda loaded: text_prompt(loaded.llm, body.tokens))
    return {"text": prompt.text}


async def _beside(request: Request, model: str | None, function: Any) -> Any:
    return await engine_of(request).call(client_of(request), model, function, now=True)


def add_routes(router: APIRouter, open_router: APIRouter, **options: Any) -> None:
    """Add the routes to a router, and those that need no key to another."""

    def add(path: str, endpoint: Any, method: str) -> None:
        router.add_api_route(path, endpoint, methods=[method], **{"response_model": None, **options})

    add("/v1/models", list_models, "GET")
    add("/v1/models/{model:path}", retrieve_model, "GET")
    add("/v1/embeddings", create_embedding, "POST")
    add("/extras/tokenize", tokenize, "POST")
    add("/extras/tokenize/count", count_tokens, "POST")
    add("/extras/detokenize", detokenize, "POST")
    add("/metrics", metrics, "GET")
    open_router.add_api_route("/health", health, methods=["GET"], response_model=None)
