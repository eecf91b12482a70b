"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from .answer import Piece, Token
from .engine import Loaded
from .errors import bad_request
from .generation import Header, Written, begin, respond, sampling_of
from .job import Work
from .prompts import check_length, check_text, text_prompt
from .request_models import CompletionRequest

PATHS = ("/v1/completions", "/v1/engines/copilot-codex/completions")


def work_of(loaded: Loaded, body: CompletionRequest) -> Work:
    """Return what is to be written; raises APIError."""
    llm = loaded.llm
    ranked = body.best_of is not None and body.best_of > body.n
    echoed = body.echo and body.logprobs is not None
    if echoed and not llm._logits_all:
        raise bad_request(
            "logprobs: with echo, the server needs the setting logits_all=true (llama-dge serve --set logits_all=true)",
            "logprobs",
        )
    prompts = []
    for text in body.prompts:
        if isinstance(text, str):
            check_text(llm, len(text.encode()), loaded.n_ctx, "prompt")
        prompt = text_prompt(llm, text, body.suffix)
        check_length(prompt, loaded.n_ctx, "prompt")
        prompts += [prompt] * (body.best_of or body.n)
    return Work(
        prompts=prompts,
        sampling=sampling_of(loaded, body, None),
        max_tokens=None if body.max_tokens in (None, -1) else body.max_tokens,
        stops=tuple(body.stop),
        n_top=body.logprobs if body.logprobs is not None else (0 if ranked else None),
        echo_logprobs=echoed,
    )


class _Choices:
    """Makes choices of pieces, whole ones and those of a stream."""

    def __init__(self, body: CompletionRequest, work: Work) -> None:
        self._body = body
        self._work = work
        self._sent: dict[int, int] = {}  # characters of each answer, for text_offset

    def choice(self, index: int, text: str, tokens: list[Token], finish: str | None) -> dict[str, Any]:
        """Return one; the prompt stands before the first text where it is echoed."""
        first = index not in self._sent
        if first and self._body.echo and not self._work.echo_logprobs:
            text = self._work.prompts[index].text + text
        start = self._sent.get(index, 0 if self._body.echo else len(self._work.prompts[index].text))
        self._sent[index] = start + len(text)
        logprobs = None if self._body.logprobs is None else _logprobs(tokens, start)
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}

    def best(self, answers: list[Written]) -> list[dict[str, Any]]:
        """Return the choices of a body: of each prompt's answers the likeliest, if more were made than are sent."""
        made, n = self._body.best_of or self._body.n, self._body.n
        chosen = []
        for start in range(0, len(answers), made):
            group = list(enumerate(answers[start : start + made], start))
            if made > n:
                group.sort(key=lambda item: -_mean_logprob(item[1].tokens))
            chosen += group[:n]
        choices = [self.choice(i, answer.text, answer.tokens, answer.finish) for i, answer in chosen]
        return [{**choice, "index": i} for i, choice in enumerate(choices)]


def _mean_logprob(tokens: list[Token]) -> float:
    return sum(token.logprob or 0.0 for token in tokens) / max(1, len(tokens))


def _logprobs(tokens: list[Token], start: int) -> dict[str, Any]:
    texts = [token.data.decode("utf-8", "replace") for token in tokens]
    offsets = [start + sum(map(len, texts[:i])) for i in range(len(texts))]
    tops = [
        None
        if token.logprob is None
        else {**{data.decode("utf-8", "replace"): value for data, value in token.top}, text: token.logprob}
        for token, text in zip(tokens, texts)
    ]
    values = [token.logprob for token in tokens]
    return {"tokens": texts, "text_offset": offsets, "token_logprobs": values, "top_logprobs": tops}


async def _chunks(
    header: Header, choices: _Choices, body: CompletionRequest, pieces: AsyncIterator[Piece], usage: Any
) -> AsyncIterator[dict[str, Any]]:
    async for piece in pieces:
        if piece.text or piece.tokens or piece.finish:
            yield header.body([choices.choice(piece.index, piece.text, piece.tokens, piece.finish)])
    if body.stream_options.include_usage:
        yield header.body([], usage=usage())


async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Answer prompts."""
    job = await begin(request, body, lambda loaded: work_of(loaded, body))
    assert job.work is not None
    header = Header("text_completion", "cmpl", body.model or job.alias)
    choices = _Choices(body, job.work)
    return await respond(
        request,
        body,
        job,
        lambda pieces: _chunks(header, choices, body, pieces, job.usage.body),
        lambda answers: header.body(choices.best(answers), usage=job.usage.body()),
    )


def add_routes(router: APIRouter, **options: Any) -> None:
    """Add the routes to a router."""
    for path in PATHS:
        router.add_api_route(
            path,
            create_completion,
            methods=["POST"],
            response_model=None,
            include_in_schema=path == PATHS[0],
            responses={200: {"description": "A completion, whose usage has dge. With stream, its chunks as events."}},
            **options,
        )
