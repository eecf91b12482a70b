"""Calls of tools over the server: forced, automatic, in a stream, sent back; and what cannot be served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from starlette.testclient import TestClient  # noqa: E402

from llama_dge.server.json_grammar import SchemaError  # noqa: E402
from llama_dge.server.request_models import Function  # noqa: E402
from llama_dge.server.tools import HEADING, HERMES, JSON, MISTRAL, Call, Parser, call_grammar, format_of  # noqa: E402
from reference.models import ZOO, make_weights, write_gguf  # noqa: E402
from reference.serving import PLAIN_TEMPLATE, TEMPLATE, TEMPLATE_KEY, openai_of, serving  # noqa: E402

ASK = [{"role": "user", "content": "weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sun": {"type": "boolean"}, "sky": {"enum": ["blue", "grey"]}},
    "required": ["sun", "sky"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
]
NAMED: Any = {"type": "function", "function": {"name": "look"}}


def client_with(tmp_path_factory: pytest.TempPathFactory, template: str) -> Iterator[TestClient]:
    path = tmp_path_factory.mktemp("models") / "chat.gguf"
    with serving(write_gguf(make_weights(ZOO["g2"]), path, {TEMPLATE_KEY: template})) as made:
        yield made


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    yield from client_with(tmp_path_factory, TEMPLATE)


def chat(client: TestClient, messages: Any = ASK, **given: Any) -> Any:
    given = {"max_tokens": 200, "temperature": 0, "tools": TOOLS, **given}
    return openai_of(client).chat.completions.create(model="tiny", messages=messages, **given)


def forced(text: str) -> dict[str, Any]:
    """Have the model write this, whatever its weights say."""
    return {"grammar": f"root ::= {json.dumps(text)}"}


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "look":
        assert set(value) == {"sun", "sky"} and value["sky"] in SCHEMA["properties"]["sky"]["enum"]  # type: ignore[index]
    else:
        assert (name, value) == ("wait", {})


def calls_of(chunks: list[Any]) -> list[tuple[str, str]]:
    """The calls that the deltas of a stream add up to, as a client joins them."""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or []:
            call = calls.setdefault(delta.index, ["", ""])
            call[0] += delta.function.name or ""
            call[1] += delta.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_be_made(client: TestClient, choice: Any) -> None:
    answer = chat(client, tool_choice=choice, max_tokens=1500).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    for call in answer.message.tool_calls:
        assert call.type == "function" and call.id
        check(call.function.name, call.function.arguments)
    names = [call.function.name for call in answer.message.tool_calls]
    if choice is NAMED:
        assert names == ["look"]
    chunks = list(chat(client, tool_choice=choice, max_tokens=1500, stream=True))
    assert calls_of(chunks) == [(c.function.name, c.function.arguments) for c in answer.message.tool_calls]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_where_the_client_asks_for_no_more(client: TestClient) -> None:
    for seed in range(4):
        message = (
            chat(client, tool_choice="required", parallel_tool_calls=False, temperature=2, seed=seed).choices[0].message
        )
        assert len(message.tool_calls) == 1


def test_some_of_the_tools(client: TestClient) -> None:
    only = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "wait"}}]},
    }
    for seed in range(3):
        message = chat(client, tool_choice=only, parallel_tool_calls=False, temperature=2, seed=seed).choices[0].message
        assert message.tool_calls[0].function.name == "wait"


CALL = '<tool_call>\n{"name": "look", "arguments": {"sun": true, "sky": "blue"}}\n</tool_call>'


@pytest.mark.parametrize(
    "text, content, n_calls",
    [
        (CALL, None, 1),
        ("I will look.\n" + CALL + "\n" + CALL, "I will look.", 2),
        ("no < call > here", "no < call > here", 0),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", 0),
        (CALL.replace("look", "fly"), CALL.replace("look", "fly"), 0),
        ("cut off <tool_call>{", "cut off <tool_call>{", 0),
    ],
)
def test_automatic_choice_in_a_stream_and_without(
    client: TestClient, text: str, content: str | None, n_calls: int
) -> None:
    given: dict[str, Any] = {"extra_body": forced(text), "tool_choice": "auto"}
    answer = chat(client, **given).choices[0]
    assert answer.message.content == content and len(answer.message.tool_calls or []) == n_calls
    assert answer.finish_reason == ("tool_calls" if n_calls else "stop")
    chunks = list(chat(client, stream=True, **given))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (content or "")
    assert calls_of(chunks) == [("look", '{"sun": true, "sky": "blue"}')] * n_calls
    assert chunks[-1].choices[0].finish_reason == answer.finish_reason


def test_the_old_names(client: TestClient) -> None:
    functions = [tool["function"] for tool in TOOLS]
    given: dict[str, Any] = {"functions": functions, "function_call": {"name": "look"}, "tools": openai.NOT_GIVEN}
    answer = chat(client, **given).choices[0]
    assert answer.finish_reason == "function_call" and answer.message.tool_calls is None
    check(answer.message.function_call.name, answer.message.function_call.arguments)
    chunks = list(chat(client, stream=True, **given))
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert [delta.arguments for delta in deltas] == [answer.message.function_call.arguments]


def test_a_call_and_its_result_that_come_back(client: TestClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"sun": true}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "blue"}
    written = '<tool_call>{"name": "look", "arguments": {"sun": true}}</tool_call>'
    want = f"<user>weather?<assistant>{written}<tool>blue<assistant>"
    expected = openai_of(client).completions.create(model="tiny", prompt=want, max_tokens=6, temperature=0)
    for reply in (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call], "refusal": None, "annotations": []},
    ):
        answer = chat(client, [*ASK, reply, result], tools=openai.NOT_GIVEN, max_tokens=6)
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
        assert answer.choices[0].message.content == expected.choices[0].text
    again = chat(client, tool_choice="required").choices[0].message  # as clients do it: the message as it came
    chat(client, [*ASK, again, {"role": "tool", "tool_call_id": again.tool_calls[0].id, "content": "grey"}])


def test_a_template_without_tools(tmp_path_factory: pytest.TempPathFactory) -> None:
    for client in client_with(tmp_path_factory, PLAIN_TEMPLATE):
        for choice in ("auto", "required", openai.NOT_GIVEN):
            with pytest.raises(openai.BadRequestError, match="the chat template of this model has none"):
                chat(client, tool_choice=choice)
        # one that is named is written by the grammar
        message = chat(client, tool_choice=NAMED).choices[0].message
        check(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)
        assert chat(client, tool_choice="none", max_tokens=5).choices[0].message.content
        # calls that come back are text there
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [
            *ASK,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        ]
        answer = chat(client, messages, tools=openai.NOT_GIVEN, max_tokens=6)
        want = '<user>weather?<assistant>{"name": "look", "arguments": "{}"}<user>blue<assistant>'
        expected = openai_of(client).completions.create(model="tiny", prompt=want, max_tokens=6, temperature=0)
        assert answer.choices[0].message.content == expected.choices[0].text


def test_the_format_of_llama_cpp_python_for_functions(zoo: Any) -> None:
    with serving(zoo["g2"].path, chat_format="chatml-function-calling") as client:
        message = chat(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
        check(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)
        text = 'functions.look:\n{"sun": true, "sky": "blue"}\nfunctions.wait:\n{}'
        message = chat(client, extra_body=forced(text)).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["look", "wait"]
        for text in ("message:\nhello", "hello"):
            assert chat(client, extra_body=forced(text)).choices[0].message.content == "hello"


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "there is no function 'fly' in tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two functions have the same name"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
          "tool_choice": "required"}, "the parameters of 'f': type 'x' is not known"),
        ({"response_format": {"type": "json_object"}}, "response_format: cannot be combined with tools"),
        ({"tool_choice": "required", "extra_body": {"grammar": 'root ::= "x"'}}, "grammar: cannot be combined"),
        ({"tools": TOOLS * 65}, "128"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_served(client: TestClient, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        chat(client, **given)


@pytest.mark.parametrize("form", [HERMES, MISTRAL, JSON, HEADING], ids=lambda form: form.name)
def test_grammars_and_parsers_agree(zoo: Any, form: Any) -> None:
    """What a grammar lets a model write is what the parser reads, in pieces of any size."""
    functions = [Function(**tool["function"]) for tool in TOOLS]
    grammar = call_grammar(form, functions, several=True)
    with serving(zoo["g2"].path) as client:
        for seed in range(5):
            body = {"prompt": "x", "grammar": grammar, "seed": seed, "temperature": 2, "max_tokens": 1500}
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            text = choice["text"]
            for step in (1, 7, len(text)):
                parser = Parser(form, ["look", "wait"])
                parts = [part for i in range(0, len(text), step) for part in parser.feed(text[i : i + step])]
                parts += parser.end()
                assert parts and all(isinstance(part, Call) for part in parts), text
                for part in parts:
                    assert isinstance(part, Call)
                    check(part.name, part.arguments)


def test_formats_of_templates() -> None:
    assert format_of("{{ messages }}") is None
    assert format_of("{{ tools }} <tool_call>") is HERMES
    assert format_of("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert format_of('{% if tools %} respond in the format {"name": ...') is JSON
    with pytest.raises(SchemaError, match="'f'"):
        call_grammar(HERMES, [Function(name="f", parameters={"type": "object", "properties": 3})], several=False)


@pytest.mark.parametrize(
    "form, text",
    [
        (MISTRAL, '[TOOL_CALLS][{"name": "look", "arguments": {"a": 1}, "id": "x"}]'),
        (MISTRAL, '[TOOL_CALLS]look[ARGS]{"a": 1}'),
        (JSON, '{"name": "look", "parameters": {"a": 1}}'),
        (JSON, '<|python_tag|>{"name": "look", "arguments": {"a": 1}}'),
    ],
)
def test_what_models_write(form: Any, text: str) -> None:
    parser = Parser(form, ["look"])
    parts = [*parser.feed(text[:5]), *parser.feed(text[5:]), *parser.end()]
    assert [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)] == [("look", {"a": 1})]
    assert len(parts) == 1
