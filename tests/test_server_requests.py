"""The server's application without sockets: what a request may ask for, and how it is answered."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")  # which brings what TestClient needs

from starlette.testclient import TestClient

from llama_dge import server
from llama_dge.cli import serve
from llama_dge.cli._common import CLIError, Progress

if TYPE_CHECKING:
    from conftest import Zoo

PROMPT = "the quick brown fox jumps over the lazy dog; " * 9  # 400 tokens of the tiny models
DGE = {"budget": 64, "draft_tokens": 2}


def client_of(zoo: Zoo, **settings: Any) -> TestClient:
    given = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 2048, "verbose": False, "dge": DGE, **settings}
    app = server.create_app(server.Settings(model=str(zoo["g2"].path), model_alias="tiny", **given))
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture  # one application at a time: llama-cpp-python has one model per process
def client(zoo: Zoo) -> Iterator[TestClient]:
    with client_of(zoo) as made:
        yield made


def post(client: TestClient, path: str = "/v1/completions", **body: Any) -> Any:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logit_bias": {"2": -100}, **body}
    return client.post(path, json=body)


def answer(client: TestClient, **body: Any) -> tuple[str, dict[str, Any]]:
    got = post(client, **body)
    assert got.status_code == 200, got.text
    return got.json()["choices"][0]["text"], got.json()["usage"]["dge"]


def fresh(client: TestClient, **body: Any) -> str:
    post(client, prompt="something else")
    return answer(client, **body)[0]


def test_a_request_without_eviction_before_one_with_it(client: TestClient) -> None:
    answer(client, dge=False, max_tokens=1)
    text, usage = answer(client)
    assert usage["state"] == "cut" and usage.get("error") is None
    assert text == fresh(client)


def test_settings_of_a_request_do_not_stay_for_the_next_one(client: TestClient) -> None:
    text, usage = answer(client, dge={"budget": 16})
    assert usage["budget"] == 16
    prompt = PROMPT + text  # goes on with that answer
    more, usage = answer(client, prompt=prompt)
    assert usage["budget"] == 64 and usage["rows_kept"] == 64 + 1
    assert more == fresh(client, prompt=prompt)


@pytest.mark.filterwarnings("ignore:The `root_path`")
def test_behind_a_proxy_with_a_prefix(zoo: Zoo) -> None:
    with client_of(zoo, root_path="/api") as client:
        for path in ("/api/v1/completions", "/v1/completions"):
            got = post(client, path)
            assert got.status_code == 200 and got.json()["usage"]["dge"]["state"] == "cut"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"logprobs": 2}, "logits_all"),
        ({"prompt": ["a", "b"]}, "prompt: 2 texts"),
        ({"logit_bias": {"x": 5}}, "'x'"),
        ({"dge": {"draft_tokens": 4096}}, "1024"),
        ({"dge": {"window": 2048, "budget": 4096}}, "1024"),
    ],
)
def test_bad_requests(client: TestClient, body: dict[str, Any], text: str) -> None:
    got = post(client, **body)
    assert got.status_code == 400 and text in got.json()["error"]["message"]
    assert answer(client)[1]["state"] == "cut"


def test_the_servers_own_draft_may_be_longer(zoo: Zoo) -> None:
    with client_of(zoo, dge={**DGE, "draft_tokens": 1500}) as client:
        assert post(client, dge={"budget": 32}).status_code == 200
        assert post(client, dge={"draft_tokens": 1600}).status_code == 400


def settings_of(zoo: Zoo, *options: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", str(zoo["g2"].path), *options])
    return server.Settings(**serve._settings(args, Progress(False))).model_dump()


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
    monkeypatch.setenv("DGE", '{"refresh": 4, "budget": 32}')
    got = settings_of(zoo, "--type-v", "q8_0", "--budget", "64")
    assert got["model_alias"] == "baz" and (got["type_k"], got["type_v"]) == (8, 8)
    assert got["dge"] == {"refresh": 4, "budget": 64}
    assert settings_of(zoo, "--type-k", "f16")["type_k"] == 1
    with pytest.raises(CLIError, match="--dge"):
        settings_of(zoo, "--set", "dge=false")
