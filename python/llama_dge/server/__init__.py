"""A server that speaks OpenAI's API, with eviction; needs ``pip install llama-dge[server]``.

``llama-dge serve`` runs it. ``uvicorn --factory llama_dge.server:create_app`` does, too, with the settings of the
environment.
"""

from __future__ import annotations

from .. import _library  # noqa: F401  # isort: skip  # first: decides which libllama is loaded

try:
    from .app import create_app
    from .settings import ConfigFileSettings, ModelSettings, ServerSettings, Settings
except ModuleNotFoundError as error:
    raise ImportError(
        f"the server needs packages that are not there ({error}). Run: pip install 'llama-dge[server]'"
    ) from error

__all__ = ["ConfigFileSettings", "ModelSettings", "ServerSettings", "Settings", "create_app"]
