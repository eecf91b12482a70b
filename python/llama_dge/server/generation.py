"""What completions and chat completions share: a request becomes a job, and its answers a body or a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from .answer import Piece, Token
from .bounds import BadOverride, request_config
from .engine import Engine, Loaded
from .errors import bad_request
from .job import Job, Work
from .request_models import Generation
from .sampling import Sampling, check_grammar, token_biases
from .streams import EventStream, until_gone


@dataclass
class Written:
    """An answer that is complete."""

    text: str
    tokens: list[Token]
    finish: str
    message: dict[str, Any] | None = None


class Header:
    """The fields that all chunks of one response share."""

    def __init__(self, kind: str, prefix: str, model: str) -> None:
        self._fields = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a body or chunk."""
        return {**self._fields, "choices": choices, **more}


def engine_of(request: Request) -> Engine:
    """Return the engine of the application that serves a request."""
    engine: Engine = request.app.state.engine
    return engine


def client_of(request: Request) -> str:
    """Return what tells clients apart that take turns in the queue."""
    return request.client.host if request.client is not None else ""


def sampling_of(loaded: Loaded, body: Generation, grammar: str | None) -> Sampling:
    """Return the settings of the choice of tokens; raises APIError."""
    llm = loaded.llm
    grammar = grammar if grammar is not None else body.grammar
    if grammar is not None:
        check_grammar(llm, grammar)
    same = ("temperature top_p min_p top_k repeat_penalty presence_penalty frequency_penalty mirostat_mode "
            "mirostat_tau mirostat_eta seed min_tokens")  # fmt: skip
    return Sampling(
        **{name: getattr(body, name) for name in same.split()},
        grammar=grammar,
        logit_bias=token_biases(llm, body.logit_bias, body.logit_bias_type),
    )


async def begin(request: Request, body: Generation, prepare: Callable[[Loaded], Work]) -> Job:
    """Queue a request, and return its job once nothing is wrong with it any more.

    Parameters
    ----------
    request
        As it came in.
    body
        What it asks for.
    prepare
        Makes the work for a model that is loaded; raises APIError.
    """
    engine = engine_of(request)
    try:
        config = request_config(engine.config(body.model), body.dge)
    except BadOverride as error:
        raise bad_request(str(error), "dge") from error

    def checked(loaded: Loaded) -> Work:
        if loaded.settings.embedding:
            raise bad_request("this model is loaded for embeddings (embedding=true) and answers no prompts", "model")
        return prepare(loaded)

    interruptible = body.stream and engine.settings.interrupt_requests
    job = Job(engine.alias(body.model), config, checked, engine.metrics, interruptible)
    await engine.submit(client_of(request), job)
    request.state.counted = True
    await until_gone(request, job, job.ready())
    return job


async def respond(
    request: Request,
    body: Generation,
    job: Job,
    chunks: Callable[[AsyncIterator[Piece]], AsyncIterator[dict[str, Any]]],
    whole: Callable[[list[Written]], dict[str, Any]],
) -> Response:
    """Return a stream of chunks, or the whole body.

    Parameters
    ----------
    request, body, job
        As in `begin`.
    chunks
        Makes chunks of pieces.
    whole
        Makes the body of all answers.
    """
    if body.stream:
        pings = not engine_of(request).settings.disable_ping_events
        return EventStream(job, chunks(job.pieces()), pings)
    answers = await until_gone(request, job, _collect(job))
    return JSONResponse(whole(answers))


async def _collect(job: Job) -> list[Written]:
    made: dict[int, Written] = {}
    async for piece in job.pieces():
        answer = made.setdefault(piece.index, Written("", [], "stop"))
        answer.text += piece.text
        answer.tokens += piece.tokens
        answer.finish = piece.finish or answer.finish
        answer.message = piece.message or answer.message
    return [made[index] for index in sorted(made)]
