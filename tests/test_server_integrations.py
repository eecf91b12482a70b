"""LangChain's ChatOpenAI, LiteLLM and instructor, the real packages, against a real server; each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integrations

START = """
import json, sys
url, prompt = sys.argv[1:3]
tiny = {"max_tokens": 8, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"sun": {"type": "boolean"}}, "required": ["sun"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
from pydantic import BaseModel, Field
from typing import Literal, List
class Weather(BaseModel):
    \"\"\"The weather.\"\"\"
    sun: bool = Field(description="whether it shines")
    sky: Literal["blue", "grey"]
    winds: List[Literal["n", "s"]] = Field(min_length=1, max_length=2)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from reference.models import ZOO, make_weights, write_gguf
    from reference.serving import DGE, TEMPLATE, TEMPLATE_KEY, Server

    path = tmp_path_factory.mktemp("models") / "chat.gguf"
    write_gguf(make_weights(ZOO["g2"]), path, {TEMPLATE_KEY: TEMPLATE})
    options = ("--n-ctx", "4096", "--alias", "tiny", "--dge", json.dumps(DGE), "--parallel", "2")
    running = Server(Path(path), *options)
    yield running.url
    assert running.stop() == 0 and not any("Traceback" in line for line in running.log), "".join(running.log)


def run(url: str, code: str) -> Any:
    from reference.serving import PROMPT

    done = subprocess.run(
        [sys.executable, "-c", START + code, url, PROMPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_langchain(url: str) -> None:
    result = run(
        url,
        """
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(model="tiny", base_url=url, api_key="k", max_tokens=5, temperature=0, max_retries=0)
first = chat.invoke([SystemMessage("be kind"), HumanMessage(prompt)])  # sends max_completion_tokens
assert first.usage_metadata["output_tokens"] <= 5, first
streamed = list(chat.stream([SystemMessage("be kind"), HumanMessage(prompt)], stream_usage=True))
assert "".join(chunk.content for chunk in streamed) == first.content

wide = ChatOpenAI(model="tiny", base_url=url, api_key="k", max_tokens=300, temperature=0, max_retries=0)
for method in ("json_schema", "function_calling"):
    assert isinstance(wide.with_structured_output(Weather, method=method).invoke("weather?"), Weather), method
bound = wide.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
called = bound.invoke([HumanMessage("weather?")])
(call,) = called.tool_calls
assert call["name"] == "look" and set(call["args"]) == {"sun"}
back = [HumanMessage("weather?"), called, ToolMessage("blue", tool_call_id=call["id"])]
assert wide.invoke(back).usage_metadata["input_tokens"] > 50
assert "".join(str(chunk.content) for chunk in wide.bind_tools([TOOL]).stream(back)) is not None
parts = [HumanMessage([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]
print(json.dumps(chat.invoke(parts).response_metadata["token_usage"]["dge"]))
""",
    )
    assert result["state"] in ("full", "evicted")


def test_litellm(url: str) -> None:
    result = run(
        url,
        """
import litellm
common = {"model": "openai/tiny", "api_base": url, "api_key": "k", "num_retries": 0}
messages = [{"role": "user", "content": prompt}]
whole = litellm.completion(messages=messages, **common, **tiny)
chunks = list(litellm.completion(messages=messages, stream=True, **common, **tiny))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
made = litellm.completion(messages=messages, response_format=Weather, **common, temperature=0, max_tokens=200)
Weather.model_validate_json(made.choices[0].message.content)
called = litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
                            **common, temperature=0, max_tokens=200)
message = called.choices[0].message
assert message.tool_calls[0].function.name == "look"
again = [*messages, message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "x"}]
assert litellm.completion(messages=again, **common, **tiny).usage.prompt_tokens > whole.usage.prompt_tokens
try:
    litellm.completion(messages=[{"role": "user", "content": prompt * 20}], **common, **tiny)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("the error is not known as one of length")
assert len(litellm.text_completion(prompt="hi", n=2, **common, max_tokens=4).choices) == 2
print(json.dumps(whole.usage.completion_tokens))
""",
    )
    assert 1 <= result <= 8


def test_instructor(url: str) -> None:
    result = run(
        url,
        """
import instructor, openai
made = []
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="k", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "weather?"}]
    try:
        weather = client.chat.completions.create(model="tiny", messages=messages, response_model=Weather, max_retries=0,
                                                 temperature=0, max_tokens=600)
    except Exception as error:
        # only asks for an object: a model of random weights writes any
        assert mode is instructor.Mode.JSON and "validation" in str(error).lower() + repr(error).lower(), (mode, error)
        continue
    assert isinstance(weather, Weather)
    made.append(mode.value)
print(json.dumps(made))
""",
    )
    assert len(result) >= 3
