"""Settings of the server: those of llama-cpp-python's server, and our own.

Each can be given by an environment variable of its name in upper case, such as ``DGE='{"budget": 512}'``, or in the
config file.
"""
# ruff: noqa: UP006, UP007, UP035, UP045  # pydantic evaluates the types, on Python 3.9 as well

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from llama_cpp.server import settings as stock
from pydantic import Field, field_validator

from ..config import DGEConfig


class ModelSettings(stock.ModelSettings):
    """Settings of one model."""

    dge: Optional[Union[bool, str, Dict[str, Any]]] = Field(
        default=True,
        description="Eviction: true (the defaults), false, the name of a preset, or an object of settings as "
        "llama_dge.DGEConfig has them.",
    )
    logits_all: bool = Field(
        default=False,
        description="Whether to keep logits of all tokens: n_ctx x n_vocab floats. Only echo with logprobs needs it.",
    )
    parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Conversations that are answered at the same time, each with a context of n_ctx tokens.",
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
        """The settings of eviction, None where it is off: also for embeddings, unless `dge` was given."""
        if self.embedding and "dge" not in self.model_fields_set:
            return None
        return DGEConfig.from_any(self.dge)

    @property
    def alias(self) -> str:
        """The name of the model for clients."""
        return self.model_alias or self.model


class ServerSettings(stock.ServerSettings):
    """Settings of the server."""

    interrupt_requests: bool = Field(
        default=False, description="Whether a new request ends the stream that is being answered, instead of waiting."
    )
    queue_limit: int = Field(
        default=256, ge=1, description="Requests that may wait; one more is refused with status 503."
    )


class Settings(ServerSettings, ModelSettings):
    """Settings of a server with one model."""


class ConfigFileSettings(ServerSettings):
    """Settings of a server as its config file has them."""

    models: List[ModelSettings] = Field(default=[], description="Settings of each model.")


def resolve(
    settings: Settings | None = None,
    server_settings: ServerSettings | None = None,
    model_settings: Sequence[ModelSettings] | None = None,
) -> tuple[ServerSettings, list[ModelSettings]]:
    """Return the settings of the server and of each model.

    Parameters
    ----------
    settings
        Of a server with one model. None: those of the environment, or of the file that ``CONFIG_FILE`` names, which
        goes before everything else.
    server_settings, model_settings
        In place of `settings`, for several models.

    Raises
    ------
    ValueError
        There is no such file, or no model.
    """
    path = os.environ.get("CONFIG_FILE")
    if path is not None:
        if not os.path.exists(path):
            raise ValueError(f"Config file {path} not found!")
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith((".yaml", ".yml")):
            import yaml  # type: ignore[import-untyped]

            text = json.dumps(yaml.safe_load(text))
        found = ConfigFileSettings.model_validate_json(text)
        server_settings, model_settings = found, found.models
    elif server_settings is None or model_settings is None:
        if server_settings is not None or model_settings is not None:
            raise ValueError("server_settings and model_settings: give both")
        settings = settings if settings is not None else Settings()  # type: ignore[call-arg]
        server_settings, model_settings = settings, [settings]
    models = list(model_settings)
    if not models:
        raise ValueError("models: the server needs one at least")
    return server_settings, models
