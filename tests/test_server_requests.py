"""The server's application without sockets: settings, what a request may ask for, and how it is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")  # which brings what TestClient needs

from starlette.testclient import TestClient

from llama_dge import DGEConfig, Llama, server
from llama_dge.server import bounds
from llama_dge.server.batch import BatchRunner
from llama_dge.server.bounds import BadOverride, request_config
from llama_dge.server.errors import APIError, Gone
from llama_dge.server.fair_queue import FairQueue
from llama_dge.server.metrics import Metrics
from llama_dge.server.serial import SerialRunner, ServerLlama
from llama_dge.server.settings import ConfigFileSettings, ModelSettings, ServerSettings
from reference.serving import BUDGET, DGE, NEVER_ENDS, PROMPT, metrics_of, openai_of, serving

if TYPE_CHECKING:
    from conftest import Zoo


@pytest.fixture(scope="module")
def client(zoo: Zoo) -> Iterator[TestClient]:
    with serving(zoo["g2"].path) as made:
        yield made


def post(client: TestClient, path: str = "/v1/completions", **body: Any) -> Any:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logit_bias": NEVER_ENDS, **body}
    return client.post(path, json=body)


def answer(client: TestClient, **body: Any) -> tuple[str, dict[str, Any]]:
    got = post(client, **body)
    assert got.status_code == 200, got.text
    return got.json()["choices"][0]["text"], got.json()["usage"]["dge"]


def fresh(client: TestClient, **body: Any) -> str:
    post(client, prompt="something else")
    return answer(client, **body)[0]


# settings of one request


def test_a_request_without_eviction_before_one_with_it(client: TestClient) -> None:
    answer(client, dge=False, max_tokens=1)
    text, usage = answer(client)
    assert usage["state"] == "evicted" and usage.get("error") is None
    assert text == fresh(client)


def test_settings_of_a_request_do_not_stay_for_the_next_one(client: TestClient) -> None:
    text, usage = answer(client, dge={"budget": 16})
    assert usage["budget"] == 16
    prompt = PROMPT + text  # goes on with that answer
    more, usage = answer(client, prompt=prompt)
    assert usage["budget"] == 64 and usage["rows_kept"] == 64 + 1
    assert more == fresh(client, prompt=prompt)


def test_presets(client: TestClient) -> None:
    _, usage = answer(client, dge="recall", max_tokens=30)
    assert usage["budget"] == 64 and usage["n_recalls"] > 3
    assert answer(client, dge="paper")[1]["n_recalls"] == 0


def test_request_config() -> None:
    base = DGEConfig(budget=100)
    assert request_config(base, None) is base and request_config(base, True) is base
    assert request_config(base, False) is None and request_config(None, None) is None
    assert request_config(None, True) == DGEConfig()
    assert request_config(base, {"window": 16}) == DGEConfig(budget=100, window=16)
    assert request_config(base, "recall") == DGEConfig(budget=100, recall=4)
    with pytest.raises(BadOverride, match="window=200"):
        request_config(base, {"window": 200})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"logit_bias": {"x": 5}}, "'x' is no token id"),
        ({"logit_bias": {"-1": 5}}, "-1 is no token id"),
        ({"logit_bias": {"3": 101}}, "101"),
        ({"logit_bias": {str(i): 1 for i in range(bounds.BIASES + 1)}}, str(bounds.BIASES)),
        ({"dge": {"draft_tokens": 4096}}, "may have 1024"),
        ({"dge": {"window": 2048, "budget": 4096}}, "may have 1024"),
        ({"dge": {"kernel_size": 131}}, "may have 129"),
        ({"dge": {"park_dir": "/"}}, "only the server's own settings"),
        ({"dge": {"budget": 10**30}}, "budget"),
        ({"dge": {"head_budgets": [[32]]}}, "head_budgets"),
        ({"n": bounds.ANSWERS + 1}, "n: "),
        ({"prompt": ["a"] * 5, "n": 4}, "20 answers"),
        ({"n": 2, "best_of": bounds.ANSWERS + 1}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of=2: must be at least n=3"),
        ({"logprobs": bounds.TOP_LOGPROBS + 1}, "logprobs"),
        ({"stop": ["x"] * (bounds.STOPS + 1)}, f"at most {bounds.STOPS} strings"),
        ({"stop": "x" * (bounds.STOP_LENGTH + 1)}, "characters each"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"grammar": "x" * (bounds.GRAMMAR_LENGTH + 1)}, "grammar"),
        ({"grammar": "root ::= " + "(" * 65 + '"x"' + ")" * 65}, "nested 65 deep"),
        ({"grammar": "root ::= root"}, "cannot be parsed"),
        ({"grammar": 'other ::= "x"'}, "cannot be parsed"),
        ({"max_token": 3}, "max_token"),
    ],
)  # fmt: skip
def test_bounds_and_bad_requests(client: TestClient, body: dict[str, Any], text: str) -> None:
    for stream in (False, True):
        got = post(client, stream=stream, **body)
        assert got.status_code == 400 and text in got.json()["error"]["message"], got.text
        assert got.json()["error"]["type"] == "invalid_request_error"
    assert answer(client)[1]["state"] == "evicted"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "items": {"type": "string"}, "maxItems": 1001}, "must be in 0 .. 1000"),
        (json.loads("".join(['{"items": '] * 40) + "{}" + "}" * 40), "deeper than 32"),
        ({"anyOf": [{"const": i} for i in range(5000)]}, "more than 4096 values"),
        ({"enum": ["x" * 100] * 1000}, "characters"),
        # each refers to the next twice: 2^14 visits, if each were visited again
        ({"$ref": "#/$defs/0", "$defs": {str(i): {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{i + 1}"}] * 2}
                                         for i in range(14)}}, "there is no '14'"),
    ],
)  # fmt: skip
def test_bounds_of_schemas(client: TestClient, schema: Any, text: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    got = client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "response_format": form}
    )
    assert got.status_code == 400 and text in got.json()["error"]["message"], got.text


def test_a_body_that_is_too_large(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BODY_BYTES", 1000)
    got = post(client)
    assert got.status_code == 200
    got = post(client, prompt=PROMPT * 3)
    assert got.status_code == 413 and "1000 bytes" in got.json()["error"]["message"]


def test_the_servers_own_settings_may_exceed_the_bounds(zoo: Zoo) -> None:
    with serving(zoo["g2"].path, dge={**DGE, "draft_tokens": 1500, "kernel_size": 201}) as client:
        assert post(client, dge={"budget": 32}).status_code == 200
        assert post(client, dge={"draft_tokens": 1600}).status_code == 400
        assert post(client, dge={"kernel_size": 203}).status_code == 400


# how it is answered


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize(
    "body, text",
    [
        ({"grammar": 'root ::= "xy"', "min_tokens": 50}, "xy"),
        ({"grammar": 'root ::= "ab" <[9999]>'}, "ab"),
        ({"grammar": 'root ::= "ab" <[9999]>', "temperature": 1.5, "top_k": 0, "mirostat_mode": 2}, "ab"),
        ({"grammar": 'root ::= "ab"', "logit_bias": {str(3 + ord("b")): -100}, "top_k": 1}, "ab"),
    ],
)
def test_an_answer_that_no_token_can_continue_ends(zoo: Zoo, parallel: int, body: Any, text: str) -> None:
    """A grammar that is made to accept a token against its rules would end the process."""
    with serving(zoo["g2"].path, parallel=parallel) as client:
        for stream in (False, True):
            got = post(client, stream=stream, **{"logit_bias": {}, **body})
            assert got.status_code == 200
        choice = post(client, **{"logit_bias": {}, **body}).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert answer(client)[1]["state"] == "evicted"


def test_min_tokens(client: TestClient) -> None:
    end = {"logit_bias": {"2": 100}}
    assert post(client, **end).json()["usage"]["completion_tokens"] == 0
    assert post(client, min_tokens=7, **end).json()["usage"]["completion_tokens"] == 7


def test_a_new_request_may_end_a_stream(zoo: Zoo) -> None:
    for interrupts in (True, False):
        with serving(zoo["g2"].path, interrupt_requests=interrupts) as client:
            api = openai_of(client)
            given: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "logit_bias": NEVER_ENDS}
            stream = api.completions.create(stream=True, max_tokens=400, **given)
            next(iter(stream))
            api.completions.create(max_tokens=2, **given)
            rest = list(stream)
            assert rest[-1].choices[0].finish_reason == "length"
            assert (len(rest) < 390) == interrupts


@pytest.mark.parametrize("parallel", [1, 2])
def test_the_engine_outlives_any_error(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, parallel: int) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("by hand")

    with serving(zoo["g2"].path, parallel=parallel) as client:
        want = fresh(client)
        for kind, name in ((SerialRunner, "_answer"), (BatchRunner, "_assemble"), (SerialRunner, "step")):
            with monkeypatch.context() as patched:
                patched.setattr(kind, name, fail)
                got = post(client)
            if (parallel == 1) == (kind is SerialRunner):
                assert got.status_code == 500 and "by hand" in got.json()["error"]["message"]
            assert answer(client)[0] == want
        with monkeypatch.context() as patched:
            patched.setattr(ServerLlama, "tokenize", fail)
            assert client.post("/extras/tokenize", json={"input": "x"}).status_code == 500
        assert client.get("/health").json()["status"] == "ok"


def test_a_client_that_goes_away_during_the_prefill(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was evaluated for it stays right, and the next request goes on with it."""
    llm = ServerLlama(str(zoo["g2"].path), n_ctx=1024, n_batch=64, n_threads=1, verbose=False, dge=DGE)
    want = llm(PROMPT, max_tokens=12, temperature=0)["choices"][0]["text"]
    llm.reset()
    batches: list[int] = []
    plain = Llama.eval

    class Leaving:
        def check(self) -> None:
            if len(batches) == 2:
                raise Gone

    def counted(self: Llama, tokens: list[int]) -> None:
        plain(self, tokens)
        batches.append(len(tokens))

    monkeypatch.setattr(Llama, "eval", counted)
    llm.job = Leaving()  # type: ignore[assignment]
    with pytest.raises(Gone):
        llm(PROMPT, max_tokens=12, temperature=0)
    assert batches == [64, 64] and llm.n_tokens == 128
    llm.job = None
    assert llm(PROMPT, max_tokens=12, temperature=0)["choices"][0]["text"] == want
    assert llm.dge_stats is not None and llm.dge_stats.rows_after == BUDGET + 1
    llm.close()


def test_errors_are_counted_and_carry_ids(client: TestClient) -> None:
    def failed() -> float:
        return metrics_of(client.get("/metrics").text)['llama_dge_requests_total{outcome="error"}']

    before = failed()
    got = client.post("/v1/completions", json={"prompt": "x", "temperature": "hot"}, headers={"x-request-id": "mine"})
    assert got.headers["x-request-id"] == "mine" and int(got.headers["openai-processing-ms"]) >= 0
    assert client.post("/v1/chat/completions", content=b"{").headers["x-request-id"]
    assert failed() == before + 2
    for url, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
        got = client.get(url)
        assert got.status_code == status and got.json()["error"]["message"]
    assert failed() == before + 2


def test_health_needs_no_key(zoo: Zoo) -> None:
    with serving(zoo["g2"].path, api_key="secret") as client:
        assert client.get("/health").json() == {"status": "ok", "model": "tiny", "running": 0, "waiting": 0}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            got = client.get("/v1/models", headers=headers)
            assert got.status_code == 401 and got.json()["error"]["code"] == "invalid_api_key"
            assert client.get("/metrics", headers=headers).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.filterwarnings("ignore:The `root_path`")
def test_behind_a_proxy_with_a_prefix(zoo: Zoo) -> None:
    with serving(zoo["g2"].path, root_path="/api") as client:
        for path in ("/api/v1/completions", "/v1/completions"):
            got = post(client, path)
            assert got.status_code == 200 and got.json()["usage"]["dge"]["state"] == "evicted"


def test_a_cache_for_states(zoo: Zoo) -> None:
    with serving(zoo["g2"].path, cache=True, dge=False) as client:
        first = post(client).json()
        post(client, prompt="x" * 50)
        again = post(client).json()
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300


def test_prompt_lookup_decoding(zoo: Zoo) -> None:
    with serving(zoo["g2"].path, draft_model="prompt-lookup-decoding", dge=False) as client:
        with serving(zoo["g2"].path, dge=False) as plain:
            want = post(plain, max_tokens=40, logprobs=0).json()["choices"][0]
        got = post(client, max_tokens=40, logprobs=0).json()["choices"][0]
        assert got["text"] == want["text"]
        assert got["logprobs"]["token_logprobs"] == pytest.approx(want["logprobs"]["token_logprobs"], abs=1e-2)


def test_extras(client: TestClient) -> None:
    tokens = client.post("/extras/tokenize", json={"input": "hi"}).json()["tokens"]
    assert len(tokens) == 3
    assert client.post("/extras/tokenize/count", json={"input": "hi"}).json() == {"count": 3}
    assert client.post("/extras/detokenize", json={"tokens": tokens[1:]}).json() == {"text": "hi"}
    assert client.post("/extras/detokenize", json={"tokens": [99999]}).status_code == 400


def test_several_models(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    models = [
        {"model": str(zoo["g2"].path), "model_alias": "a", "dge": DGE, **common},
        {"model": str(zoo["g1"].path), "model_alias": "b", "dge": False, **common},
        {"model": str(zoo["g2"].path), "model_alias": "vectors", "embedding": True, **common},
        {"model": str(tmp_path / "none.gguf"), "model_alias": "missing", **common},
    ]
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"models": models}), encoding="utf-8")
    monkeypatch.setenv("CONFIG_FILE", str(config))
    with TestClient(server.create_app(), raise_server_exceptions=False) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["a", "b", "vectors", "missing"]
        texts = {name: post(client, model=name).json()["choices"][0]["text"] for name in ("b", "a")}
        assert texts["a"] != texts["b"]
        assert post(client, model="b").json()["usage"]["dge"]["state"] == "off"
        got = post(client, model="gpt-4o").json()
        assert got["choices"][0]["text"] == texts["a"] and got["usage"]["dge"]["state"] == "evicted"
        vectors = client.post("/v1/embeddings", json={"model": "vectors", "input": "hi"})
        assert len(vectors.json()["data"][0]["embedding"]) == 64
        got = post(client, model="missing")
        assert got.status_code == 500 and "missing cannot be loaded" in got.json()["error"]["message"]
        assert post(client, model="b").json()["choices"][0]["text"] == texts["b"]


# settings of the server


def test_settings_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ModelSettings(model="m")
    assert settings.dge_config == DGEConfig() and settings.logits_all is False
    assert ModelSettings(model="m", embedding=True).dge_config is None
    assert ServerSettings().interrupt_requests is False
    monkeypatch.setenv("DGE", '{"budget": 33}')
    assert ModelSettings(model="m").dge_config == DGEConfig(budget=33)
    assert ModelSettings(model="m", dge=False).dge_config is None
    monkeypatch.setenv("DGE", "false")
    assert ModelSettings(model="m").dge_config is None
    text = '{"models": [{"model": "m", "dge": {"budget": 44}}, {"model": "n", "logits_all": true}]}'
    models = ConfigFileSettings.model_validate_json(text).models
    assert models[0].dge_config == DGEConfig(budget=44) and models[1].logits_all
    assert ModelSettings(model="m", dge="recall").dge_config == DGEConfig.preset("recall")
    for bad, message in (({"budget": 0}, "budget=0"), ({"x": 1}, "unknown setting 'x'"), ("x", "preset")):
        with pytest.raises(ValueError, match=message):
            ModelSettings(model="m", dge=bad)


def test_metrics_are_prometheus_text() -> None:
    metrics = Metrics()
    metrics.count("ok")
    metrics.add(evictions=2)
    metrics.set(kv_bytes=5)
    lines = metrics.text().splitlines()
    assert 'llama_dge_requests_total{outcome="ok"} 1' in lines
    assert "llama_dge_evictions_total 2" in lines and "# TYPE llama_dge_evictions_total counter" in lines
    assert "llama_dge_kv_bytes 5" in lines and "# TYPE llama_dge_kv_bytes gauge" in lines
    for line in lines:
        assert line.startswith(("# HELP llama_dge_", "# TYPE llama_dge_", "llama_dge_"))
    assert len(metrics_of(metrics.text())) >= 20


def test_clients_take_turns_and_the_queue_is_bounded() -> None:
    queue: FairQueue[str] = FairQueue(5)
    for name in ("a1", "a2", "a3", "b1", "c1"):
        queue.put(name[0], name)
    with pytest.raises(APIError, match="5 requests are waiting") as caught:
        queue.put("d", "d1")
    assert caught.value.status == 503
    taken = []
    while (item := queue.head(wait=False)) is not None:
        assert queue.take() == item
        taken.append(item)
    assert taken == ["a1", "b1", "c1", "a2", "a3"]
    queue.put("a", "a4")
    assert queue.close() == ["a4"] and queue.head(wait=True) is None
    with pytest.raises(APIError, match="stops"):
        queue.put("a", "a5")
