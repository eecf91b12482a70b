"""``llama-dge serve`` with the client of OpenAI: a real process, real sockets, a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from llama_dge import DGEConfig, Llama  # noqa: E402
from llama_dge.cli import main  # noqa: E402
from llama_dge.server.metrics import Metrics  # noqa: E402
from llama_dge.server.model import Gone, Request, ServerLlama, Service  # noqa: E402
from llama_dge.server.settings import (  # noqa: E402
    BadOverride,
    ConfigFileSettings,
    ModelSettings,
    ServerSettings,
    request_config,
)

if TYPE_CHECKING:
    from conftest import Zoo

PROMPT = "the quick brown fox jumps over the lazy dog; " * 9  # 400 tokens of the tiny models
BUDGET = 64
DGE = {"budget": BUDGET, "draft_tokens": 2}
NEVER_ENDS = {"2": -100}  # the token that ends an answer


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
        self.client = openai.OpenAI(base_url=f"http://localhost:{self.port}/v1", api_key="k", max_retries=0, timeout=20)

    def metrics(self) -> dict[str, float]:
        text = self.client.get("/../metrics", cast_to=str)
        return {name: float(value) for name, value in re.findall(r"^(\w+\S*) (\S+)$", text, flags=re.MULTILINE)}

    def stop(self, sig: int = signal.SIGTERM) -> int:
        self.process.send_signal(sig)
        status = self.process.wait(timeout=20)
        self._reader.join()
        return status


@pytest.fixture(scope="module")
def server(zoo: Zoo) -> Iterator[Server]:
    running = Server(zoo["g2"].path, "--n-ctx", "2048", "--alias", "tiny", "--dge", json.dumps(DGE))
    yield running
    running.client.close()
    running.stop()
    assert not any("Traceback" in line for line in running.log), "".join(running.log)


def complete(server: Server, prompt: str = PROMPT, n: int = 12, **settings: Any) -> Any:
    return server.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=n, temperature=0, logit_bias=NEVER_ENDS, **settings
    )


def eventually(happened: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def outcome(server: Server, name: str) -> float:
    return server.metrics()[f'llama_dge_requests_total{{outcome="{name}"}}']


def test_completion_carries_the_rows_in_usage(server: Server) -> None:
    before = server.metrics()
    usage = complete(server).usage
    dge = usage.dge
    assert (dge["state"], dge["rows_kept"], dge["budget"], dge["error"]) == ("cut", BUDGET + 1, BUDGET, None)
    assert dge["rows_before"] == usage.prompt_tokens + 1
    assert dge["n_refresh"] == 0 and dge["bytes_after"] < dge["bytes_before"]
    after = server.metrics()
    grown = {name: after[f"llama_dge_{name}_total"] - before[f"llama_dge_{name}_total"] for name in (
        "prompt_tokens", "completion_tokens", "cuts", "rows_evicted", "refreshes"
    )}  # fmt: skip
    assert grown == {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": 12,
        "cuts": 1,
        "rows_evicted": dge["rows_before"] - dge["rows_kept"],
        "refreshes": 0,
    }
    assert after["llama_dge_parked_bytes"] >= dge["bytes_parked"] > 0
    assert 0 < after["llama_dge_kv_bytes"] < after["llama_dge_kv_max_bytes"]
    assert after["llama_dge_cut_seconds_total"] > before["llama_dge_cut_seconds_total"]


def test_stream_gives_the_same_text_and_usage(server: Server) -> None:
    whole = complete(server)
    complete(server, "another")
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.dge["rows_kept"] == BUDGET + 1
    assert all(chunk.usage is None for chunk in complete(server, stream=True))


def test_chat_and_a_later_turn_that_is_restored(server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPT}]

    def ask() -> Any:
        return server.client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, logit_bias=NEVER_ENDS
        )

    before = server.metrics()
    first = ask()
    assert first.usage.dge["state"] == "cut" and first.usage.dge["rows_kept"] == BUDGET + 1
    messages.append({"role": "assistant", "content": "it jumps"})
    messages.append({"role": "user", "content": "and what then?"})
    second = ask()
    assert second.usage.dge["rows_restored"] > 380
    assert second.usage.dge["rows_before"] == second.usage.prompt_tokens + 1
    after = server.metrics()
    assert after["llama_dge_restores_total"] > before["llama_dge_restores_total"]
    assert after["llama_dge_rows_restored_total"] >= before["llama_dge_rows_restored_total"] + 380
    chunks = server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, logit_bias=NEVER_ENDS, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == second.choices[0].message.content


def test_two_clients_at_once(server: Server) -> None:
    prompts = [PROMPT, PROMPT.upper()]
    want = [complete(server, prompt, n=40).choices[0].text for prompt in prompts]

    def stream(prompt: str) -> str:
        return "".join(chunk.choices[0].text for chunk in complete(server, prompt, n=40, stream=True))

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, prompt) for prompt in prompts]
        wholes = [pool.submit(complete, server, prompt, 40) for prompt in prompts]
        assert [future.result() for future in streams] == want
        assert [future.result().choices[0].text for future in wholes] == want


@pytest.mark.parametrize("draft_tokens, cuts", [(500, 0), (2, 1)], ids=["during the draft", "after the cut"])
def test_client_goes_away_from_a_stream(server: Server, draft_tokens: int, cuts: int) -> None:
    want = complete(server).choices[0].text
    before, cancelled = server.metrics(), outcome(server, "cancelled")
    stream = complete(server, PROMPT.title(), n=1400, stream=True, extra_body={"dge": {"draft_tokens": draft_tokens}})
    for _ in range(8):
        next(stream)
    stream.close()
    eventually(lambda: outcome(server, "cancelled") == cancelled + 1)

    answer = complete(server)
    assert answer.choices[0].text == want
    assert answer.usage.dge["rows_kept"] == BUDGET + 1
    after = server.metrics()
    assert after["llama_dge_cuts_total"] - before["llama_dge_cuts_total"] == 1 + cuts
    assert after["llama_dge_completion_tokens_total"] - before["llama_dge_completion_tokens_total"] < 450


def test_client_goes_away_from_a_request_without_stream(server: Server) -> None:
    want = complete(server).choices[0].text
    before, cancelled = server.metrics(), outcome(server, "cancelled")
    body = json.dumps({"prompt": PROMPT.title(), "max_tokens": 1500, "logit_bias": NEVER_ENDS}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("localhost", server.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        time.sleep(0.15)
    eventually(lambda: outcome(server, "cancelled") == cancelled + 1)
    after = server.metrics()
    assert after["llama_dge_completion_tokens_total"] - before["llama_dge_completion_tokens_total"] < 1500
    assert complete(server).choices[0].text == want


def test_client_goes_away_during_the_prefill(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ServerLlama(str(zoo["g2"].path), n_ctx=1024, n_batch=64, n_threads=1, verbose=False, dge=DGE)
    want = llm(PROMPT, max_tokens=12, temperature=0)["choices"][0]["text"]
    llm.reset()
    request = llm.request = Request(Service())
    batches: list[int] = []
    plain = Llama.eval

    def eval_and_go(self: Llama, tokens: list[int]) -> None:
        plain(self, tokens)
        batches.append(len(tokens))
        if len(batches) == 2:
            request.gone.set()

    monkeypatch.setattr(Llama, "eval", eval_and_go)
    with pytest.raises(Gone, match="the client has gone away"):
        llm(PROMPT, max_tokens=12, temperature=0)
    assert batches == [64, 64] and llm.n_tokens == 128
    llm.request = None
    assert llm(PROMPT, max_tokens=12, temperature=0)["choices"][0]["text"] == want
    assert llm.dge_stats is not None and llm.dge_stats.rows_after == BUDGET + 1
    llm.close()


def test_settings_of_one_request(server: Server) -> None:
    def rows(dge: object) -> tuple[str, int]:
        usage = complete(server, extra_body={"dge": dge}).usage.dge
        return usage["state"], usage["rows_kept"]

    assert rows({"budget": 96, "draft_tokens": 3}) == ("cut", 98)
    state, n = rows(False)
    assert state == "off" and n > 400
    assert rows(True) == ("cut", BUDGET + 1)
    assert rows(None) == ("cut", BUDGET + 1)
    assert rows({"scores": "policy", "budget": 0.5})[0] == "cut"


@pytest.mark.parametrize(
    "dge, text",
    [
        ({"budget": 0}, "budget=0: must be an int in 1 .."),
        ({"window": BUDGET + 1}, f"window={BUDGET + 1}: must be at most budget={BUDGET}"),
        ({"budgets": 5}, "dge: unknown setting 'budgets'; allowed are policy"),
        ("on", "dge='on': must be true, false or an object of settings"),
        ({"park_dir": "/"}, "dge: park_dir: only the server's own settings have that"),
        ({"head_budgets": [[32]]}, "head_budgets"),  # of another model; only the library can tell
    ],
)
def test_bad_settings_of_one_request(server: Server, dge: object, text: str) -> None:
    failed = outcome(server, "error")
    with pytest.raises(openai.BadRequestError, match=re.escape(text)) as caught:
        complete(server, extra_body={"dge": dge})
    assert (caught.value.param, caught.value.type) == ("dge", "invalid_request_error")
    with pytest.raises(openai.APIError, match=re.escape(text)):
        list(complete(server, stream=True, extra_body={"dge": dge}))
    assert outcome(server, "error") == failed + 2
    assert complete(server).usage.dge["rows_kept"] == BUDGET + 1


def test_bad_requests_are_no_errors_of_the_server(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.client.completions.create(model="tiny", prompt="x", temperature="hot")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        complete(server, PROMPT * 6)
    with pytest.raises(openai.APIError, match="exceed context window"):
        list(complete(server, PROMPT * 6, stream=True))
    assert [model.id for model in server.client.models.list()] == ["tiny"]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_shutdown_in_the_middle_of_answers(zoo: Zoo, tmp_path: Path, sig: int) -> None:
    park = tmp_path / "park"
    park.mkdir()
    config = tmp_path / "config.json"
    model = {"model": str(zoo["g2"].path), "model_alias": "tiny", "n_ctx": 2048, "verbose": False}
    dge = {**DGE, "park": "disk", "park_dir": str(park)}
    config.write_text(json.dumps({"api_key": "k", "models": [{**model, "dge": dge}]}), encoding="utf-8")
    server = Server(config, "--config", str(config))
    with pytest.raises(openai.AuthenticationError):
        server.client.with_options(api_key="wrong").get("/../metrics", cast_to=str)
    stream = complete(server, n=1500, stream=True)
    for _ in range(5):
        next(stream)
    assert list(park.iterdir())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, server, PROMPT.upper(), 1500)
        time.sleep(0.1)
        start = time.monotonic()
        assert server.stop(sig) == 0
        assert time.monotonic() - start < 8
        assert waiting.exception() is not None
    assert not list(park.iterdir())
    assert not any("Traceback" in line for line in server.log), "".join(server.log)


def test_settings_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ModelSettings(model="m")
    assert settings.dge_config == DGEConfig() and settings.logits_all is False
    assert ServerSettings().interrupt_requests is False
    monkeypatch.setenv("DGE", '{"budget": 33}')
    assert ModelSettings(model="m").dge_config == DGEConfig(budget=33)
    assert ModelSettings(model="m", dge=False).dge_config is None
    monkeypatch.setenv("DGE", "false")
    assert ModelSettings(model="m").dge_config is None
    text = '{"models": [{"model": "m", "dge": {"budget": 44}}, {"model": "n", "logits_all": true}]}'
    models = ConfigFileSettings.model_validate_json(text).models
    assert models[0].dge_config == DGEConfig(budget=44) and models[1].logits_all
    for bad, message in (({"budget": 0}, "budget=0"), ({"x": 1}, "unknown setting 'x'")):
        with pytest.raises(ValueError, match=message):
            ModelSettings(model="m", dge=bad)


def test_request_config() -> None:
    base = DGEConfig(budget=100)
    assert request_config(base, None) is base and request_config(base, True) is base
    assert request_config(base, False) is None and request_config(None, None) is None
    assert request_config(None, True) == DGEConfig()
    assert request_config(base, {"window": 16}) == DGEConfig(budget=100, window=16)
    with pytest.raises(BadOverride, match="window=200: must be at most budget=100"):
        request_config(base, {"window": 200})


def test_metrics_are_prometheus_text() -> None:
    metrics = Metrics()
    metrics.count("ok")
    metrics.add(cuts=2)
    metrics.set(kv_bytes=5)
    lines = metrics.text().splitlines()
    assert 'llama_dge_requests_total{outcome="ok"} 1' in lines
    assert "llama_dge_cuts_total 2" in lines and "# TYPE llama_dge_cuts_total counter" in lines
    assert "llama_dge_kv_bytes 5" in lines and "# TYPE llama_dge_kv_bytes gauge" in lines
    assert all(re.fullmatch(r"# (HELP|TYPE) .+|llama_dge_\w+(\{\w+=\"\w+\"\})? [\d.e+-]+", line) for line in lines)


@pytest.mark.parametrize(
    "options, text",
    [
        (["--dge", "{"], "is not JSON"),
        (["--dge", "3"], "must be true, false or an object"),
        (["--dge", '{"budget": 0}'], "budget=0: must be an int in"),
        (["--budget", "4"], "window=8: must be at most budget=4"),
        (["--full", "--budget", "64"], "--full excludes"),
        (["--set", "n_batches=3"], "--set n_batches=3: must be NAME=VALUE with one of api_key"),
        (["--config", "servers.json"], "MODEL and --config: choose one"),
    ],
)
def test_bad_options(zoo: Zoo, capsys: pytest.CaptureFixture[str], options: list[str], text: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["serve", str(zoo["g2"].path), *options]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert text in capsys.readouterr().err


def test_bad_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("CONFIG_FILE", "")  # the command sets it
    path = tmp_path / "servers.yaml"
    path.write_text("models: [", encoding="utf-8")
    try:
        assert main(["serve", "--config", str(path)]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "while parsing" in capsys.readouterr().err
