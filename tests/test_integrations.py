"""LangChain and LlamaIndex, the real packages, build our class; each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Zoo

pytestmark = pytest.mark.integrations

PROMPT = "the quick brown fox jumps over the lazy dog; " * 9
START = """
import json, sys
import llama_dge
llama_dge.patch_llama_cpp()
path, prompt, dge = sys.argv[1], sys.argv[2], {"budget": 64, "draft_tokens": 2}
"""
END = """
assert type(llm) is llama_dge.Llama
stats = llm.dge_stats
print(json.dumps({"state": stats.state, "rows": stats.rows_after, "restored": stats.rows_restored, "texts": texts}))
"""


def run(zoo: Zoo, code: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", START + code + END, str(zoo["g2"].path), PROMPT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (result["state"], result["rows"]) == ("evicted", 65)
    assert all(result["texts"])
    return result


def test_langchain_llm(zoo: Zoo) -> None:
    run(
        zoo,
        """
from langchain_community.llms import LlamaCpp
chain = LlamaCpp(model_path=path, n_ctx=1024, n_threads=1, max_tokens=12, temperature=0, verbose=False,
                 model_kwargs={"dge": dge})
whole = chain.invoke(prompt)
streamed = "".join(chain.stream(prompt))
assert streamed == whole
llm, texts = chain.client, [whole, streamed]
""",
    )


def test_langchain_chat_gets_rows_back_in_a_later_turn(zoo: Zoo) -> None:
    result = run(
        zoo,
        """
from langchain_community.chat_models import ChatLlamaCpp
from langchain_core.messages import AIMessage, HumanMessage
chat = ChatLlamaCpp(model_path=path, n_ctx=1024, n_threads=1, max_tokens=12, temperature=0, verbose=False,
                    model_kwargs={"dge": dge})
first = chat.invoke([HumanMessage(prompt)])
again = [HumanMessage(prompt), AIMessage("it jumps"), HumanMessage("and then?")]
second = chat.invoke(again)
streamed = "".join(chunk.content for chunk in chat.stream(again))
assert streamed == second.content
llm, texts = chat.client, [first.content, second.content]
""",
    )
    assert result["restored"] > 380


def test_llama_index(zoo: Zoo) -> None:
    run(
        zoo,
        """
from llama_index.llms.llama_cpp import LlamaCPP
index = LlamaCPP(model_path=path, context_window=1024, max_new_tokens=12, temperature=0, verbose=False,
                 messages_to_prompt=str, completion_to_prompt=str, model_kwargs={"dge": dge, "n_threads": 1})
whole = index.complete(prompt).text
streamed = "".join(part.delta for part in index.stream_complete(prompt))
assert streamed == whole
llm, texts = index._model, [whole, streamed]
""",
    )


def test_llama_index_that_was_imported_first_is_refused(zoo: Zoo) -> None:
    code = "import llama_dge, llama_index.llms.llama_cpp; llama_dge.patch_llama_cpp()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: patch_llama_cpp: llama_index.llms.llama_cpp.base has taken the stock Llama" in done.stderr


@pytest.mark.parametrize("name", ["openai", "langchain_community", "llama_index"])
def test_code_of_the_page_runs_as_pasted(name: str) -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "integrations.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"from {name}" in block]
    server = None
    if name == "openai":
        (options,) = re.findall(r"^llama-dge serve ([^#\n]+)", page, re.MULTILINE)
        command = [sys.executable, "-m", "llama_dge", "serve", *options.split(), "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        found = next(filter(None, (re.search(r"http://localhost:\d+/v1", line) for line in server.stderr)))
        code = code.replace("http://localhost:8000/v1", found.group())
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    finally:
        if server is not None:
            server.terminate()
            server.communicate()
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    before, after = re.search(r"(\d+) -> (\d+) entries", done.stdout).groups()  # type: ignore[union-attr]
    assert int(before) > 2000
    assert int(after) == (512 if name == "openai" else 256) + 3  # k - 1 rows of the draft come on top
    assert server is None or server.returncode == 0
