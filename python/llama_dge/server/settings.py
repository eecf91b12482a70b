"""Settings of the server: llama-cpp-python's, and `dge`.

Each can be given by an environment variable of its name in upper case, such as ``DGE='{"budget": 512}'``, or in the
config file.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Union  # noqa: UP035  # pydantic evaluates them, on Python 3.9 as well

from llama_cpp.server import settings as stock
from pydantic import Field, field_validator

from ..config import DGEConfig

#: Not for a client to choose: they touch the server's memory and disk, or are decided when the model is loaded.
SERVER_ONLY = ("elastic", "park", "park_dir", "park_limit", "strict")


class ModelSettings(stock.ModelSettings):
    """Settings of one model."""

    dge: Optional[Union[bool, Dict[str, Any]]] = Field(  # noqa: UP006, UP007, UP045
        default=True,
        description="Eviction: true (the defaults), false, or an object of settings as llama_dge.DGEConfig has them.",
    )
    logits_all: bool = Field(
        default=False,
        description="Whether to return logits of all tokens: n_ctx x n_vocab floats. Only echo with logprobs needs it.",
    )

    @field_validator("dge")
    @classmethod
    def _check_dge(cls, value: Any) -> Any:
        try:
            DGEConfig.from_any(value)
        except TypeError as error:
            raise ValueError(str(error)) from error  # the only kind that pydantic reports
        return value

    @property
    def dge_config(self) -> DGEConfig | None:
        """The settings of eviction, None where it is off."""
        return DGEConfig.from_any(self.dge)


class ServerSettings(stock.ServerSettings):
    """Settings of the server."""

    interrupt_requests: bool = Field(
        default=False, description="Whether a new request ends the stream that is being answered, instead of waiting."
    )


class Settings(ServerSettings, ModelSettings):
    """Settings of a server with one model."""


class ConfigFileSettings(ServerSettings):
    """Settings of a server as its config file has them."""

    models: List[ModelSettings] = Field(default=[], description="Settings of each model.")  # noqa: UP006


#: Tokens of draft and window that a request may ask for, or as many as the server's own: queries are held for them.
MOST_QUERIES = 1024


class BadOverride(ValueError):
    """The `dge` of a request does not fit."""


def request_config(base: DGEConfig | None, override: object) -> DGEConfig | None:
    """Return the settings that a request gets.

    Parameters
    ----------
    base
        Those of the server.
    override
        The `dge` of the request: None leaves them, False turns eviction off, True on, a dict changes some fields.

    Raises
    ------
    BadOverride
        With the message of `DGEConfig`.
    """
    if override is None:
        return base
    if override is False:
        return None
    start = DGEConfig() if base is None else base
    if override is True:
        return start
    if not isinstance(override, dict):
        raise BadOverride(f"dge={override!r}: must be true, false or an object of settings")
    refused = [name for name in SERVER_ONLY if name in override]
    if refused:
        raise BadOverride(f"dge: {', '.join(refused)}: only the server's own settings have that")
    try:
        fields = [field.name for field in dataclasses.fields(DGEConfig)]
        DGEConfig.from_any({name: value for name, value in override.items() if name not in fields})  # raises if any
        config = dataclasses.replace(start, **override)
    except (TypeError, ValueError) as error:
        raise BadOverride(str(error)) from error
    n, most = config.draft_tokens + config.window, max(MOST_QUERIES, start.draft_tokens + start.window)
    if n > most:
        raise BadOverride(f"dge: draft_tokens and window are {n} together, and a request may have {most} of them")
    return config
