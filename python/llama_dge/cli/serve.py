"""``llama-dge serve``: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from ..config import DGEConfig
from ._common import CLIError, Progress, model_path
from ._options import (
    CACHE_TYPES,
    UNQUANTISED,
    add_cache_options,
    add_context,
    add_dge_options,
    add_model,
    add_threads,
    add_verbose,
    at_least,
    given_dge_options,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

_SHUTDOWN_SECONDS = 5


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "serve",
        help="OpenAI-compatible server",
        description="A server that speaks OpenAI's API, with eviction. A request may have a field dge of its own: "
        "false, true, or an object of settings. Settings are those of llama-cpp-python's server and our own; each can "
        """be given by an environment variable as well: DGE='{"budget": 512}'. GET /metrics has counters for """
        "Prometheus.",
    )
    add_model(parser, optional=True)
    parser.add_argument("--config", metavar="FILE", help="server and models as JSON or YAML, in place of MODEL")
    parser.add_argument("--host", metavar="HOST", help="address to listen at (localhost)")
    parser.add_argument("--port", type=at_least(0), metavar="N", help="port (8000); 0 takes a free one")
    parser.add_argument("--api-key", metavar="KEY", help="key that every request has to have")
    parser.add_argument("--alias", metavar="NAME", help="name of the model for clients (MODEL)")
    add_context(parser, "2048")
    add_cache_options(parser)
    parser.set_defaults(type_k=None, type_v=None)  # whatever the environment or --set says
    parser.add_argument(
        "-np", "--parallel", type=at_least(1), metavar="N", help="conversations at once, each with N_CTX tokens (1)"
    )
    add_threads(parser)
    parser.add_argument("--chat-format", metavar="NAME", help="format of llama-cpp-python (the model's template)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other setting of the server or the model, such as n_batch=256; may be repeated",
    )
    parser.add_argument("--dge", metavar="JSON", help="settings of eviction: true, false or '{\"budget\": 512}'")
    parser.add_argument("--full", action="store_true", help="keep the full cache, as --dge false")
    add_dge_options(parser, DGEConfig())
    add_verbose(parser)
    parser.set_defaults(command_function=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        from yaml import YAMLError  # type: ignore[import-untyped]

        from .. import server
    except ImportError as error:
        raise CLIError(str(error)) from error

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    progress = Progress(args.verbose)
    try:
        if args.model is None:
            app = _configured(args)
        else:
            if args.config is not None:
                raise CLIError("MODEL and --config: choose one")
            if "CONFIG_FILE" in os.environ:
                raise CLIError("MODEL is given, and the environment names a CONFIG_FILE: choose one")
            given = _settings(args, progress)
            progress.update("loading the model")
            app = server.create_app(server.Settings(**given))
    except (ValueError, RuntimeError, OSError, YAMLError) as error:
        raise CLIError(_text(error)) from error
    finally:
        progress.clear()
    settings = app.state.engine.settings
    host = args.host if args.host is not None else settings.host
    port = args.port if args.port is not None else settings.port
    return _serve(app, host, port, args.verbose, settings.ssl_keyfile, settings.ssl_certfile)


def _configured(args: argparse.Namespace) -> FastAPI:
    """Create the application that --config describes, or the environment."""
    from .. import server

    if args.config is not None:
        os.environ["CONFIG_FILE"] = args.config
    elif "MODEL" not in os.environ and "CONFIG_FILE" not in os.environ:
        raise CLIError("give a MODEL, or --config")
    own = (
        "alias",
        "n_ctx",
        "parallel",
        "flash_attn",
        "type_k",
        "type_v",
        "threads",
        "chat_format",
        "set",
        "dge",
        "full",
    )
    given = [name for name in (*own, "api_key") if getattr(args, name)] + list(given_dge_options(args))
    if given:
        raise CLIError(f"{', '.join('--' + name.replace('_', '-') for name in given)}: needs MODEL")
    return server.create_app()


def _settings(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from ..server import Settings

    given: dict[str, Any] = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if name == "dge":
            raise CLIError(f"--set {text}: use --dge JSON")
        if not equals or name not in Settings.model_fields:
            raise CLIError(f"--set {text}: must be NAME=VALUE with one of {', '.join(sorted(Settings.model_fields))}")
        try:
            given[name] = json.loads(value)
        except json.JSONDecodeError:
            given[name] = value
    options = {
        "api_key": args.api_key,
        "n_ctx": args.n_ctx,
        "parallel": args.parallel,
        "n_threads": args.threads,
        "n_threads_batch": args.threads,
        "chat_format": args.chat_format,
        "dge": _dge(args),
    }
    given.update({name: value for name, value in options.items() if value is not None})
    given.update(_cache(args))
    if args.verbose or "VERBOSE" not in os.environ:
        given.setdefault("verbose", args.verbose)
    if args.alias or not ("model_alias" in given or "MODEL_ALIAS" in os.environ):
        given["model_alias"] = args.alias or args.model
    given["model"] = str(model_path(args.model, progress))
    return given


def _cache(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the options say of the cache, and nothing else: the environment or --set may say the rest."""
    types = {name: getattr(args, name) for name in ("type_k", "type_v")}
    settings: dict[str, Any] = {name: CACHE_TYPES[value] for name, value in types.items() if value is not None}
    if args.flash_attn is not None:
        settings["flash_attn"] = args.flash_attn
    elif types["type_v"] not in (None, *UNQUANTISED):
        settings["flash_attn"] = True
    return settings


def _dge(args: argparse.Namespace) -> Any:
    """Return the setting `dge`, or None where no option is about it."""
    given = given_dge_options(args)
    if args.full:
        if given or args.dge is not None:
            raise CLIError("--full excludes every other setting of eviction")
        return False
    if args.dge is None:
        return given or None
    try:
        value = json.loads(args.dge)
    except json.JSONDecodeError as error:
        raise CLIError(f"--dge {args.dge}: is not JSON: {error}") from error
    if not isinstance(value, (bool, dict)):
        raise CLIError(f"--dge {args.dge}: must be true, false or an object of settings")
    if value is False and given:
        raise CLIError("--dge false excludes every other setting of eviction")
    return {**(value if isinstance(value, dict) else {}), **given} if given else value


def _text(error: Exception) -> str:
    """The message of an error; of pydantic's, one line per setting."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        problems = (
            (".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")) for item in error.errors()
        )
        return "; ".join(f"{where}: {text}" for where, text in problems)
    return str(error)


def _serve(app: FastAPI, host: str, port: int, verbose: bool, ssl_keyfile: str | None, ssl_certfile: str | None) -> int:
    import uvicorn

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="info" if verbose else "warning",
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if not self.should_exit:
                name = f"[{host}]" if ":" in host else host
                scheme = "https" if ssl_certfile else "http"
                found = self.servers[0].sockets[0].getsockname()[1]
                print(f"llama-dge serve: {scheme}://{name}:{found}/v1, Ctrl-C ends it", file=sys.stderr, flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.engine.stop()  # answers end with the next token
            await super().shutdown(sockets=sockets)

    server = Server(config)
    try:
        server.run()
    except KeyboardInterrupt:
        pass  # uvicorn passes the signal on when everything is closed
    finally:
        app.state.engine.close()
    return 0 if server.started else 1
