"""`llama_dge.Llama` shows the parameters of ``llama_cpp.Llama``: programs pass on only what a signature names."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from typing import Any

import llama_cpp
import pytest

from llama_dge import Llama

STOCK = llama_cpp.Llama
METHODS = sorted(
    name
    for name in dir(STOCK)
    if (not name.startswith("_") or name in ("__init__", "__call__")) and callable(getattr(STOCK, name))
)


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", METHODS)
def test_parameters_are_those_of_the_stock_class(name: str) -> None:
    ours, stock = parameters(getattr(Llama, name)), parameters(getattr(STOCK, name))
    if name == "__init__":
        assert stock[-1][0] == "kwargs" and ("dge", inspect.Parameter.KEYWORD_ONLY, None) in ours
        ours = [parameter for parameter in ours if parameter[0] != "dge"]
    assert ours == stock


@pytest.mark.parametrize("name", METHODS)
def test_annotations_can_be_resolved(name: str) -> None:
    try:
        stock = typing.get_type_hints(getattr(STOCK, name))
    except (TypeError, NameError):
        pytest.skip("the stock class's cannot either")
    ours = typing.get_type_hints(getattr(Llama, name))
    assert {key: value for key, value in ours.items() if key != "dge"} == stock


def test_there_are_methods_to_compare() -> None:
    assert len(METHODS) > 25 and {"generate", "create_chat_completion", "from_pretrained"} <= set(METHODS)


def test_the_class_itself_and_a_patched_llama_cpp() -> None:
    code = """if True:
        import inspect, llama_dge
        llama_dge.patch_llama_cpp()
        import llama_cpp
        names = list(inspect.signature(llama_cpp.Llama).parameters)
        print(names[0], names[-1], len(names), "dge" in names, "n_ctx" in names, "type_k" in names)
        print(len(inspect.signature(llama_cpp.Llama.create_chat_completion).parameters))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    n, n_chat = len(parameters(STOCK)) + 1, len(parameters(STOCK.create_chat_completion))
    assert done.stdout.split() == ["model_path", "kwargs", str(n), "True", "True", "True", str(n_chat)], done.stderr


def test_documentation_is_ours() -> None:
    for name in ("generate", "load_state", "set_cache"):
        doc = getattr(Llama, name).__doc__
        assert "evict" in doc, name
    assert Llama.tokenize.__doc__ == STOCK.tokenize.__doc__
