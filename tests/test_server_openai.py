"""What clients of OpenAI's API send today, by its own client: each is answered, or refused for a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from pydantic import BaseModel  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

from reference.models import ZOO, make_weights, write_gguf  # noqa: E402
from reference.serving import FILL_IN, NEVER_ENDS, PROMPT, TEMPLATE, TEMPLATE_KEY, openai_of, serving  # noqa: E402

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "chat.gguf"
    return write_gguf(make_weights(ZOO["g2"]), where, {TEMPLATE_KEY: TEMPLATE, **FILL_IN})


@pytest.fixture(scope="module")
def client(path: Path) -> Iterator[TestClient]:
    with serving(path) as made:
        yield made


def chat(client: TestClient, messages: Any = HI, **given: Any) -> Any:
    given = {"max_tokens": 8, "temperature": 0, "logit_bias": NEVER_ENDS, **given}
    return openai_of(client).chat.completions.create(model="tiny", messages=messages, **given)


def complete(client: TestClient, prompt: Any = "hi", **given: Any) -> Any:
    given = {"max_tokens": 8, "temperature": 0, "logit_bias": NEVER_ENDS, **given}
    return openai_of(client).completions.create(model="tiny", prompt=prompt, **given)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def same_prompt(client: TestClient, answer: Any, prompt: str) -> None:
    """The messages were rendered to this text: the model sees as many tokens, and goes on as it does after them."""
    want = complete(client, prompt)
    assert answer.usage.prompt_tokens == want.usage.prompt_tokens
    assert answer.choices[0].message.content == want.choices[0].text


def test_max_completion_tokens_is_honoured(client: TestClient) -> None:
    for limit in ({"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 9}):
        answer = chat(client, **{"max_tokens": openai.NOT_GIVEN, **limit})
        assert answer.usage.completion_tokens == 5 and answer.choices[0].finish_reason == "length"


def test_several_answers_from_one_prefill(client: TestClient) -> None:
    one = complete(client, PROMPT, temperature=1.5, seed=3, logit_bias=NEVER_ENDS)
    many = complete(client, PROMPT, n=3, temperature=1.5, seed=3)
    texts = [choice.text for choice in many.choices]
    assert [choice.index for choice in many.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == one.choices[0].text
    assert many.usage.prompt_tokens == one.usage.prompt_tokens and many.usage.completion_tokens == 24
    assert many.usage.dge["state"] == "evicted" and many.usage.dge["rows_restored"] > 400  # each on its own
    chunks = list(complete(client, PROMPT, n=3, temperature=1.5, seed=3, stream=True))
    streamed = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(3)]
    assert streamed == texts
    replies = chat(client, n=2, temperature=1.5, seed=5).choices
    assert len({reply.message.content for reply in replies}) == 2


def test_best_of_sends_the_likeliest(client: TestClient) -> None:
    given: dict[str, Any] = {"temperature": 1.5, "seed": 3, "logprobs": 0}
    every = complete(client, n=4, **given).choices
    best = complete(client, best_of=4, n=2, **given).choices
    ranked = sorted(every, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    assert [choice.text for choice in best] == [choice.text for choice in ranked[:2]]
    with pytest.raises(openai.BadRequestError, match="best_of: cannot be streamed"):
        complete(client, best_of=4, stream=True)


def test_several_prompts(client: TestClient) -> None:
    both = complete(client, ["hi", PROMPT], n=2, temperature=1.5, seed=1)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[2].text == complete(client, PROMPT, temperature=1.5, seed=3).choices[0].text


def test_content_as_parts(client: TestClient) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    same_prompt(client, chat(client, [{"role": "user", "content": parts}]), "<user>one\ntwo<assistant>")
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError, match="does not see images; serve one with clip_model_path"):
        chat(client, [{"role": "user", "content": image}])
    with pytest.raises(openai.BadRequestError, match="type 'input_audio' is not served"):
        chat(
            client,
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
        )


class Weather(BaseModel):
    good: bool
    wind: Literal["none", "some"]
    degrees: int


class Report(BaseModel):
    days: tuple[Weather, Weather]
    note: None


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_for_the_answer(client: TestClient, strict: bool) -> None:
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "w", "schema": Weather.model_json_schema(), "strict": strict},
    }
    answer = chat(client, response_format=schema, max_tokens=200)
    Weather.model_validate_json(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    streamed = text_of(chat(client, response_format=schema, max_tokens=200, stream=True))
    assert streamed == answer.choices[0].message.content


def test_parse(client: TestClient) -> None:
    answer = openai_of(client).chat.completions.parse(
        model="tiny", messages=HI, response_format=Report, max_tokens=400, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Report)


def test_json_object(client: TestClient) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=900, temperature=1, seed=1)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    "schema, reason",
    [
        ({"type": "thing"}, "type 'thing' is not known"),
        ({"$ref": "https://x/y"}, "nothing is fetched"),
        ({"type": "string", "maxLength": 10**9}, "maxLength is 1000000000, and must be in 0 .. 1000"),
        ([], "must be an object"),
    ],
)
def test_a_schema_without_grammar(client: TestClient, schema: Any, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(reason)):
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def test_role_developer_is_system(client: TestClient) -> None:
    same_prompt(
        client, chat(client, [{"role": "developer", "content": "be kind"}, *HI]), "<system>be kind<user>hi<assistant>"
    )


def test_null_is_the_default(client: TestClient) -> None:
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": HI})):
        common = {"seed": 1, "logit_bias": NEVER_ENDS, "max_tokens": 4}
        want = client.post(path, json={**body, **common}).json()["choices"]
        fields = client.get("/openapi.json").json()["components"]["schemas"]
        name = "ChatRequest" if "messages" in body else "CompletionRequest"
        others = set(fields[name]["properties"]) - set(body) - set(common)
        assert len(others) > 20
        got = client.post(path, json={**body, **common, **dict.fromkeys(others), "user": None, "audio": None})
        assert got.status_code == 200 and got.json()["choices"] == want, got.text


def test_token_ids_as_prompt(client: TestClient) -> None:
    tokens = client.post("/extras/tokenize", json={"input": "hi there"}).json()["tokens"]
    want = complete(client, "hi there")
    assert complete(client, tokens).choices[0].text == want.choices[0].text
    assert complete(client, [tokens]).usage.prompt_tokens == want.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="-1 is no token id"):
        complete(client, [5, -1])


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None, 7, {"a": 1}, ["a", 3], [["a"]]])
def test_a_prompt_that_is_none(client: TestClient, prompt: Any) -> None:
    for body in ({"prompt": prompt}, {}) if prompt is None else ({"prompt": prompt},):
        got = client.post("/v1/completions", json=body)
        error = got.json()["error"]
        assert got.status_code == 400 and error["param"] == "prompt" and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b"[]", b"3", b"{" * 100_000, b'{"prompt": NaN}'])
@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/extras/tokenize"])
def test_a_body_that_is_no_json_object(client: TestClient, content: bytes, url: str) -> None:
    got = client.post(url, content=content, headers={"content-type": "application/json"})
    assert got.status_code == 400 and got.json()["error"]["message"]


def test_too_long_before_the_stream_begins(client: TestClient) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as caught:
            complete(client, PROMPT * 6, stream=stream)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, [{"role": "user", "content": PROMPT * 6}], stream=stream)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"


def test_a_text_that_no_tokenizer_could_fit_is_not_tokenized(client: TestClient) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x" * 5_000_000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stop", ["", [""], ["", ""], None])
def test_an_empty_stop_is_ignored(client: TestClient, stop: Any) -> None:
    assert complete(client, stop=stop).choices[0].text == complete(client).choices[0].text


def test_stop_strings(client: TestClient) -> None:
    text = complete(client, max_tokens=20).choices[0].text
    for stop in (text[7:9], [text[12:15], text[7:9]], text[7:30]):
        want = text if isinstance(stop, str) and stop not in text else text[:7] if text.index(text[7:9]) == 7 else None
        got = complete(client, max_tokens=20, stop=stop).choices[0]
        assert got.text == want and got.finish_reason == ("stop" if len(got.text) < 20 else "length")
        chunks = list(complete(client, max_tokens=20, stop=stop, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == got.text


def test_logprobs_need_no_setting(client: TestClient) -> None:
    given: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "extra_body": {"repeat_penalty": 1}}
    answer = chat(client, **given)
    content = answer.choices[0].logprobs.content
    assert "".join(item.token for item in content) == answer.choices[0].message.content
    for item in content:  # greedy: the token is the likeliest
        assert item.logprob == item.top_logprobs[0].logprob and len(item.top_logprobs) == 3
        assert sorted((top.logprob for top in item.top_logprobs), reverse=True) == [
            t.logprob for t in item.top_logprobs
        ]
        assert -50 < item.logprob <= 0
    chunks = list(chat(client, stream=True, **given))
    streamed = [item for c in chunks if c.choices[0].logprobs for item in c.choices[0].logprobs.content]
    assert [item.token for item in streamed] == [item.token for item in content]
    with pytest.raises(openai.BadRequestError, match=r"--set logits_all=true"):
        complete(client, echo=True, logprobs=1)
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        chat(client, top_logprobs=3)


def test_echo_with_logprobs(path: Path) -> None:
    with serving(path, logits_all=True, n_ctx=256) as client:
        for n in (0, 4):
            choice = complete(client, "hi there", echo=True, logprobs=2, max_tokens=n).choices[0]
            assert choice.text.startswith("hi there") and len(choice.text) == 8 + n
            assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset[:3] == [0, 1, 2]
            values = choice.logprobs.token_logprobs
            assert all(value <= 0 for value in values[1:])
        again = complete(client, "hi there", logprobs=2, max_tokens=4).choices[0]
        assert again.logprobs.token_logprobs == pytest.approx(values[8:], abs=1e-2)


def test_echo(client: TestClient) -> None:
    assert complete(client, echo=True).choices[0].text == "hi" + complete(client).choices[0].text
    chunks = list(complete(client, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks).startswith("hi") and len(chunks) > 3


def test_fill_in_the_middle(client: TestClient, zoo: Any) -> None:
    for prefix in ("def f(", PROMPT):  # the second one is evicted
        answer = complete(client, prefix, suffix=") -> None:")
        tokens = client.post("/extras/tokenize", json={"input": ") -> None:"}).json()["tokens"][1:]
        before = client.post("/extras/tokenize", json={"input": prefix}).json()["tokens"]
        want = complete(client, [before[0], 4, *before[1:], 5, *tokens, 6])
        assert answer.choices[0].text == want.choices[0].text
        assert answer.usage.dge["state"] == ("evicted" if prefix == PROMPT else "full")
    with serving(zoo["g2"].path) as plain, pytest.raises(openai.BadRequestError, match="no tokens for filling in"):
        complete(plain, "a", suffix="b")


def test_embeddings_on_a_chat_model(client: TestClient) -> None:
    with pytest.raises(openai.BadRequestError, match="embedding=true"):
        openai_of(client).embeddings.create(model="tiny", input="hi")


def test_a_model_for_embeddings(path: Path) -> None:
    with serving(path, embedding=True, dge=None) as client:  # dge is off by itself there
        api = openai_of(client)
        one = api.embeddings.create(model="tiny", input="hi").data[0].embedding
        both = api.embeddings.create(model="tiny", input=["ho", "hi"], encoding_format="float")
        assert both.data[1].embedding == pytest.approx(one, abs=1e-6) and both.usage.total_tokens == 6
        assert sum(x * x for x in one) == pytest.approx(1, abs=1e-5) and len(one) == ZOO["g2"].n_embd
        with pytest.raises(openai.BadRequestError, match="512") as caught:
            api.embeddings.create(model="tiny", input="x" * 600)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="vectors have 64"):
            api.embeddings.create(model="tiny", input="hi", dimensions=3)
        with pytest.raises(openai.BadRequestError, match="loaded for embeddings"):
            chat(client)
    with pytest.raises(ValueError, match="exclude each other"), serving(path, embedding=True, dge=True):
        pass


def test_template_variables(client: TestClient) -> None:
    same_prompt(
        client, chat(client, extra_body={"chat_template_kwargs": {"effort": "no"}}), "<user>hi<effort no><assistant>"
    )
    same_prompt(client, chat(client, reasoning_effort="low"), "<user>hi<reasoning low><assistant>")
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs: messages: set by the server"):
        chat(client, extra_body={"chat_template_kwargs": {"messages": []}})


def test_models(client: TestClient) -> None:
    api = openai_of(client)
    assert [model.id for model in api.models.list()] == ["tiny"] and api.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'x'"):
        api.models.retrieve("x")
    assert complete(client).model == "tiny"
