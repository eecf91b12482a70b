"""The server for tests: its application in this process, or a process of ``llama-dge serve``, with tiny models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import uvicorn
from starlette.testclient import TestClient

from llama_dge import server

PROMPT = "the quick brown fox jumps over the lazy dog; " * 9  # 405 tokens of the tiny models
BUDGET = 64
DGE = {"budget": BUDGET, "draft_tokens": 2}
NEVER_ENDS = {"2": -100}  # the token that ends an answer

#: Shows all that it is given, and has calls written as Hermes and Qwen do.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tools>{{ tools | tojson }} call: <tool_call></tools>{% endif %}"
    "{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
    "{% if effort is defined %}<effort {{ effort }}>{% endif %}"
    "{% if reasoning_effort is defined %}<reasoning {{ reasoning_effort }}>{% endif %}"
    "<assistant>"
)
PLAIN_TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TEMPLATE_KEY = "tokenizer.chat_template"
FILL_IN = {f"tokenizer.ggml.fim_{name}_token_id": 4 + i for i, name in enumerate(("pre", "suf", "mid"))}


def settings_of(path: Path, **settings: Any) -> server.Settings:
    """Settings of a server with one tiny model, which is called tiny."""
    given = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 2048, "verbose": False, "dge": DGE, **settings}
    if given["dge"] is None:
        del given["dge"]
    return server.Settings(model=str(path), model_alias="tiny", **given)


@contextmanager
def serving(path: Path, **settings: Any) -> Iterator[TestClient]:
    """Run an application; without sockets, unless `openai_of` asks for them."""
    app = server.create_app(settings_of(path, **settings))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
        if (sockets := _SOCKETS.pop(app, None)) is not None:
            sockets.close()


class _Sockets:
    """The same application on a port of its own."""

    def __init__(self, app: Any) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        eventually(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="k", max_retries=0, timeout=60)

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join()


_SOCKETS: dict[Any, _Sockets] = {}


def openai_of(client: TestClient) -> openai.OpenAI:
    """The client of OpenAI for such an application, over a socket."""
    if client.app not in _SOCKETS:
        _SOCKETS[client.app] = _Sockets(client.app)
    return _SOCKETS[client.app].client


def eventually(happened: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until something has happened."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def metrics_of(text: str) -> Mapping[str, float]:
    """Read the text format of Prometheus."""
    return {name: float(value) for name, value in re.findall(r"^(\w+\S*) (\S+)$", text, flags=re.MULTILINE)}


class Server:
    """A process of ``llama-dge serve``."""

    def __init__(self, model: Path, *options: str, **environment: str) -> None:
        models = [str(model)] if model.suffix == ".gguf" else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llama_dge", "serve", *models, "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "N_THREADS": "1", "N_THREADS_BATCH": "1", "OMP_NUM_THREADS": "1", **environment},
        )
        assert self.process.stderr is not None
        self.log: list[str] = []
        found = None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"http://localhost:(\d+)/v1", line)
            if found is not None:
                break
        assert found is not None, "".join(self.log)
        self.port = int(found.group(1))
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr or []), daemon=True)
        self._reader.start()
        self.url = f"http://localhost:{self.port}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="k", max_retries=0, timeout=20)

    def metrics(self) -> Mapping[str, float]:
        """Read its counters."""
        return metrics_of(self.client.get("/../metrics", cast_to=str))

    def outcome(self, name: str) -> float:
        """Number of requests that ended so."""
        return self.metrics()[f'llama_dge_requests_total{{outcome="{name}"}}']

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """End it; returns its exit status."""
        self.process.send_signal(sig)
        status = self.process.wait(timeout=20)
        self._reader.join()
        self.client.close()
        return status
