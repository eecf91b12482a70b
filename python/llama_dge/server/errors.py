"""Errors as OpenAI's API has them: ``{"error": {"message", "type", "param", "code"}}``, always JSON."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from .metrics import Metrics

logger = logging.getLogger(__name__)

#: Messages of one answer; a union of types has one for each of its members.
_MOST_PROBLEMS = 4
_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


class APIError(Exception):
    """A request that is not answered, and why.

    Parameters
    ----------
    status
        HTTP status.
    message
        One sentence for the client.
    param
        The field of the request, where one is at fault.
    code
        A word for programs, where OpenAI's API has one.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Gone(APIError):
    """Nobody waits for this answer any more: the client went away, or the server stops."""

    def __init__(self) -> None:
        super().__init__(503, "the request was cancelled: the client has gone away, or the server stops")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """Return the error of a request that cannot be answered as it is."""
    return APIError(400, message, param, code)


def context_exceeded(n_prompt: int, n_ctx: int, param: str) -> APIError:
    """Return the error of a prompt that leaves no room for an answer."""
    return bad_request(
        f"This model's maximum context length is {n_ctx} tokens, and {param} has {n_prompt}, which leaves no room "
        "for an answer. Shorten it, or serve the model with a larger n_ctx; eviction does not raise n_ctx",
        param,
        "context_length_exceeded",
    )


def as_api_error(error: BaseException) -> APIError:
    """Return what a client is told of an error, which is logged unless the request is at fault."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, UnicodeEncodeError):
        return bad_request(f"the text holds half a character (a lone surrogate): {error.reason}")
    logger.error("a request failed", exc_info=error)
    return APIError(500, f"{type(error).__name__}: {error}")


def _invalid(error: RequestValidationError) -> APIError:
    problems: list[str] = []
    param = None
    code = None
    for item in error.errors():
        # the names of a union's members say nothing to a client
        path = [
            str(part) for part in item["loc"][1:] if not re.search(r"[\[\]()]|^(str|int|float|bool|list)$", str(part))
        ]
        where = ".".join(path)
        if item["type"] == "json_invalid":
            problems.append(f"the body is not JSON: {item.get('ctx', {}).get('error', item['msg'])}")
            continue
        if not path and item["type"] == "model_attributes_type":
            problems.append("the body must be a JSON object, with content-type: application/json")
            continue
        if item["type"] == "missing":
            code = "missing_required_parameter"
        elif item["type"] == "extra_forbidden":
            code = "unknown_parameter"
        text = item["msg"].removeprefix("Value error, ")
        problems.append(f"{where}: {text}" if where else text)
        if path:
            param = param or path[0]
        elif (named := re.match(r"(\w+)(:|=| is not served)", text)) is not None:  # of a rule for the whole body
            param = param or named.group(1)
    problems = list(dict.fromkeys(problems))
    more = f"; and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
    return bad_request("; ".join(problems[:_MOST_PROBLEMS]) + more, param, code)


def install(app: FastAPI, metrics: Metrics, counted: tuple[str, ...]) -> None:
    """Let an application answer every error as JSON, and count those at the paths of completions."""

    def answer(request: Request, error: APIError, headers: Any = None) -> JSONResponse:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        if request.method == "POST" and path in counted and not getattr(request.state, "counted", False):
            metrics.count("error")
        return JSONResponse(error.body(), status_code=error.status, headers=headers)

    @app.exception_handler(APIError)
    async def refused(request: Request, error: APIError) -> JSONResponse:
        return answer(request, error, {"retry-after": "1"} if error.status == 503 else None)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(request, as_api_error(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return answer(request, APIError(error.status_code, str(error.detail)), error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return answer(request, as_api_error(error))
