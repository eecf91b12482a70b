"""Bodies of all kinds, by the published schema and against it: answered or refused, never an error of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from reference.models import ZOO, make_weights, write_gguf
from reference.serving import TEMPLATE, TEMPLATE_KEY, serving

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/extras/tokenize", "/extras/detokenize")

TEXT = st.text(max_size=12) | st.sampled_from(
    ["user", "assistant", "tool", "json_schema", "function", "\ud800", "\0", "x" * 500]
)
NUMBER = st.integers(-3, 40) | st.sampled_from([2**31, 2**63, -(2**64), 1e308, 0.5, -0.0])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def values(schema: dict[str, Any], parts: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a schema."""
    if "$ref" in schema:
        return st.deferred(lambda: values(parts[schema["$ref"].rsplit("/", 1)[1]], parts, depth + 1))
    if "anyOf" in schema:
        return st.one_of([values(item, parts, depth) for item in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema and depth < 5:
        required = set(schema.get("required", []))
        fields = {name: values(item, parts, depth + 1) | st.none() for name, item in schema["properties"].items()}
        return st.fixed_dictionaries(
            {name: fields[name] for name in required}, optional={n: fields[n] for n in fields if n not in required}
        )
    if kind == "object":
        return st.dictionaries(TEXT, JSON, max_size=3)
    if kind == "array":
        return st.lists(values(schema.get("items", {}), parts, depth + 1), max_size=3)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        "string": TEXT, "integer": NUMBER, "number": NUMBER, "boolean": st.booleans(), "null": st.none()
    }  # fmt: skip
    return simple.get(kind, JSON)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    path = tmp_path_factory.mktemp("models") / "chat.gguf"
    with serving(write_gguf(make_weights(ZOO["one"]), path, {TEMPLATE_KEY: TEMPLATE}), n_ctx=256) as made:
        yield made


@pytest.fixture(scope="module")
def bodies(client: TestClient) -> dict[str, st.SearchStrategy[Any]]:
    api = client.get("/openapi.json").json()
    parts = api["components"]["schemas"]
    made = {}
    for url in URLS:
        schema = api["paths"][url]["post"]["requestBody"]["content"]["application/json"]["schema"]
        by_schema = values(schema, parts)
        names = sorted(parts[schema["$ref"].rsplit("/", 1)[1]]["properties"])
        odd = st.tuples(by_schema, st.dictionaries(st.sampled_from(names), JSON, max_size=2))
        made[url] = st.one_of(by_schema, odd.map(lambda pair: {**pair[0], **pair[1]}), JSON)
    return made


def check(client: TestClient, url: str, body: Any) -> None:
    got = client.post(url, content=json.dumps(body), headers={"content-type": "application/json"})
    assert got.status_code in (200, 400), (body, got.text)
    if got.status_code == 400:
        error = got.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
    elif isinstance(body, dict) and body.get("stream"):
        assert got.text.endswith("data: [DONE]\n\n"), (body, got.text)


@pytest.mark.parametrize("url", URLS)
def test_never_an_error_of_the_server(client: TestClient, bodies: dict[str, st.SearchStrategy[Any]], url: str) -> None:
    @settings(max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies[url])
    def run(body: Any) -> None:
        if isinstance(body, dict) and url.endswith("completions"):
            body = {**body, "max_tokens": 3}
            body.pop("max_completion_tokens", None)
        check(client, url, body)

    run()
    assert client.get("/health").json()["status"] == "ok"


KEYWORDS = ["type", "properties", "items", "enum", "const", "anyOf", "allOf", "$ref", "required", "format", "$defs",
            "additionalProperties", "minItems", "maxLength", "prefixItems"]  # fmt: skip


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(KEYWORDS), JSON))
@example({"type": "object", "properties": {"": {"$ref": "#"}}})
@example({"$ref": "#"})
@example({"anyOf": [{"$ref": "#"}, {"type": "null"}]})
@example({"type": "array", "items": {"$ref": "#"}, "minItems": 1})
def test_never_for_a_schema(client: TestClient, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    check(client, URLS[0], {"messages": [{"role": "user", "content": "x"}], "response_format": form, "max_tokens": 3})


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.text('root:=|()[]{}*+?"\\^-.x 1,\n', max_size=40))
@example('"x"*')
@example('("x"*)*')
@example("")
@example('""')
@example("<[9999]>")
def test_never_for_a_grammar(client: TestClient, rule: str) -> None:
    check(client, URLS[1], {"prompt": "x", "grammar": f"root ::= {rule}", "max_tokens": 3, "min_tokens": 2})
