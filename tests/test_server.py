"""``llama-dge serve`` with the client of OpenAI: a real process, real sockets, a tiny model."""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from llama_dge import server as library  # noqa: E402
from llama_dge.cli import main, serve  # noqa: E402
from llama_dge.cli._common import CLIError, Progress  # noqa: E402
from reference.serving import BUDGET, DGE, NEVER_ENDS, PROMPT, Server, eventually  # noqa: E402

if TYPE_CHECKING:
    from conftest import Zoo


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


def test_completion_carries_the_rows_in_usage(server: Server) -> None:
    before = server.metrics()
    usage = complete(server).usage
    dge = usage.dge
    assert (dge["state"], dge["rows_kept"], dge["budget"], dge["error"]) == ("evicted", BUDGET + 1, BUDGET, None)
    assert dge["rows_before"] == usage.prompt_tokens + 1
    assert dge["n_recalls"] == 0 and dge["bytes_after"] < dge["bytes_before"]
    after = server.metrics()
    grown = {name: after[f"llama_dge_{name}_total"] - before[f"llama_dge_{name}_total"] for name in (
        "prompt_tokens", "completion_tokens", "evictions", "rows_evicted", "recalls"
    )}  # fmt: skip
    assert grown == {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": 12,
        "evictions": 1,
        "rows_evicted": dge["rows_before"] - dge["rows_kept"],
        "recalls": 0,
    }
    assert after["llama_dge_parked_bytes"] >= dge["bytes_parked"] > 0
    assert 0 < after["llama_dge_kv_bytes"] < after["llama_dge_kv_max_bytes"]
    assert after["llama_dge_eviction_seconds_total"] > before["llama_dge_eviction_seconds_total"]


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
    assert first.usage.dge["state"] == "evicted" and first.usage.dge["rows_kept"] == BUDGET + 1
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


@pytest.mark.parametrize("draft_tokens, evictions", [(500, 0), (2, 1)], ids=["during the draft", "after the eviction"])
def test_client_goes_away_from_a_stream(server: Server, draft_tokens: int, evictions: int) -> None:
    want = complete(server).choices[0].text
    before, cancelled = server.metrics(), server.outcome("cancelled")
    stream = complete(server, PROMPT.title(), n=1400, stream=True, extra_body={"dge": {"draft_tokens": draft_tokens}})
    for _ in range(8):
        next(stream)
    stream.close()
    eventually(lambda: server.outcome("cancelled") == cancelled + 1)

    answer = complete(server)
    assert answer.choices[0].text == want
    assert answer.usage.dge["rows_kept"] == BUDGET + 1
    after = server.metrics()
    assert after["llama_dge_evictions_total"] - before["llama_dge_evictions_total"] == 1 + evictions
    assert after["llama_dge_completion_tokens_total"] - before["llama_dge_completion_tokens_total"] < 450


def test_client_goes_away_from_a_request_without_stream(server: Server) -> None:
    want = complete(server).choices[0].text
    before, cancelled = server.metrics(), server.outcome("cancelled")
    body = json.dumps({"prompt": PROMPT.title(), "max_tokens": 1500, "logit_bias": NEVER_ENDS}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("localhost", server.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        time.sleep(0.15)
    eventually(lambda: server.outcome("cancelled") == cancelled + 1)
    after = server.metrics()
    assert after["llama_dge_completion_tokens_total"] - before["llama_dge_completion_tokens_total"] < 1500
    assert complete(server).choices[0].text == want


def test_settings_of_one_request(server: Server) -> None:
    def rows(dge: object) -> tuple[str, int]:
        usage = complete(server, extra_body={"dge": dge}).usage.dge
        return usage["state"], usage["rows_kept"]

    assert rows({"budget": 96, "draft_tokens": 3}) == ("evicted", 98)
    state, n = rows(False)
    assert state == "off" and n > 400
    assert rows(True) == ("evicted", BUDGET + 1)
    assert rows(None) == ("evicted", BUDGET + 1)
    assert rows({"scores": "policy", "budget": 0.5})[0] == "evicted"


@pytest.mark.parametrize(
    "dge, text",
    [
        ({"budget": 0}, "budget=0"),
        ({"refresh": 4}, "recall"),  # its old name
        ({"window": BUDGET + 1}, f"budget={BUDGET}: must be at least {BUDGET + 1}"),
        ({"budgets": 5}, "dge: unknown setting 'budgets'; allowed are policy"),
        ("on", "dge='on': must be true, false, a preset ("),
        ({"park_dir": "/"}, "dge: park_dir: only the server's own settings have that"),
        ({"head_budgets": [[32]]}, "head_budgets"),  # of another model; only the library can tell
    ],
)
def test_bad_settings_of_one_request(server: Server, dge: object, text: str) -> None:
    failed = server.outcome("error")
    with pytest.raises(openai.BadRequestError, match=re.escape(text)) as caught:
        complete(server, extra_body={"dge": dge})
    assert (caught.value.param, caught.value.type) == ("dge", "invalid_request_error")
    with pytest.raises(openai.APIError, match=re.escape(text)):
        list(complete(server, stream=True, extra_body={"dge": dge}))
    assert server.outcome("error") == failed + 2
    assert complete(server).usage.dge["rows_kept"] == BUDGET + 1


def test_bad_requests_are_no_errors_of_the_server(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.client.completions.create(model="tiny", prompt="x", temperature="hot")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        complete(server, PROMPT * 6)
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


@pytest.mark.parametrize(
    "options, text",
    [
        (["--dge", "{"], "is not JSON"),
        (["--dge", "3"], "must be true, false or an object"),
        (["--dge", '{"budget": 0}'], "serve: error: dge: budget=0: must be in 1"),
        (["--budget", "4"], "budget=4: must be at least 8"),
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


def settings_of(zoo: Zoo, *options: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", str(zoo["g2"].path), *options])
    return library.Settings(**serve._settings(args, Progress(False))).model_dump()


def test_options_do_not_hide_other_settings(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(zoo["g2"].path)
    assert settings_of(zoo)["model_alias"] == path
    assert settings_of(zoo, "--set", "model_alias=foo")["model_alias"] == "foo"
    assert settings_of(zoo, "--set", "model_alias=foo", "--alias", "bar")["model_alias"] == "bar"
    got = settings_of(zoo, "--set", "flash_attn=true", "--type-k", "q8_0")
    assert got["flash_attn"] and got["type_k"] == 8 and got["type_v"] is None
    assert settings_of(zoo, "--type-v", "q8_0")["flash_attn"]
    assert not settings_of(zoo, "--type-v", "f16")["flash_attn"]

    monkeypatch.setenv("MODEL_ALIAS", "baz")
    monkeypatch.setenv("TYPE_K", "8")
    monkeypatch.setenv("DGE", '{"recall": 4, "budget": 32}')
    got = settings_of(zoo, "--type-v", "q8_0", "--budget", "64")
    assert got["model_alias"] == "baz" and (got["type_k"], got["type_v"]) == (8, 8)
    assert got["dge"] == {"recall": 4, "budget": 64}
    assert settings_of(zoo, "--type-k", "f16")["type_k"] == 1
    with pytest.raises(CLIError, match="--dge"):
        settings_of(zoo, "--set", "dge=false")
