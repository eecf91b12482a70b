"""Instances in child processes: forked, spawned, pickled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Zoo

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

START = """
import os, signal, sys, threading
from itertools import islice
from llama_dge import Llama

PROMPT = [4 + i * 7 % 200 for i in range(150)]

def new(dge):
    return Llama(sys.argv[1], dge=dge, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)

def answer(llm):
    return list(islice(llm.generate(PROMPT, temp=0.0), 20))

def in_child(work):
    "Run in a forked child; return what it printed, or how it ended."
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that hangs ends with SIGALRM
        try:
            text = str(work())
        except RuntimeError as error:
            text = f"RuntimeError: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return text if status == 0 else f"status {status}"
"""


def run(code: str, zoo: Zoo, tmp_path: Path) -> str:
    script = tmp_path / "script.py"
    script.write_text(START + code)
    done = subprocess.run(
        [sys.executable, str(script), str(zoo["g2"].path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WHILE_ANOTHER_THREAD = """
# another thread stops in the middle of a decode, or of a token of its request
llm = new({dge})
entered, go_on = threading.Event(), threading.Event()
got = []

def stop(*_):
    entered.set()
    go_on.wait(60)

if {inside!r} == "decode":
    decode = llm._ctx.decode
    def stopping(batch):
        stop()
        decode(batch)
    llm._ctx.decode = stopping
    processors = None
else:
    def processors(tokens, logits):
        stop()
        return logits
    processors = [processors]
stream = llm.generate(PROMPT, temp=0.0, logits_processor=processors)
thread = threading.Thread(target=lambda: got.extend(islice(stream, 20)))
thread.start()
entered.wait(60)

def child():
    go_on.set()
    llm.reset()
    return answer(llm) == want

want = answer(new({dge}))
print(in_child(child))
print(in_child(lambda: llm.dge_stats if llm.n_tokens else llm.save_state()))
go_on.set()
thread.join()
print(got == want and answer(llm) == want)
"""


@needs_fork
@pytest.mark.parametrize("inside", ["decode", "sample"])
def test_forked_while_another_thread_decodes(zoo: Zoo, tmp_path: Path, inside: str) -> None:
    code = WHILE_ANOTHER_THREAD.format(dge={"budget": 32, "draft_tokens": 3}, inside=inside)
    child, stats, parent = run(code, zoo, tmp_path).splitlines()
    for line in (child, stats):
        assert line.startswith("RuntimeError: this instance was in use by another thread when the process was forked")
        assert 'multiprocessing.get_context("spawn")' in line
    assert parent == "True"


@needs_fork
def test_forked_with_eviction_off(zoo: Zoo, tmp_path: Path) -> None:
    code = WHILE_ANOTHER_THREAD.format(dge=None, inside="sample")
    assert run(code, zoo, tmp_path).splitlines() == ["True", "None", "True"]


@needs_fork
def test_forked_while_nothing_runs(zoo: Zoo, tmp_path: Path) -> None:
    """Between two requests, and by the thread of a stream, which goes on in both processes."""
    code = """
llm = new({"budget": 32, "draft_tokens": 3})
want = answer(llm)
print(in_child(lambda: answer(llm) == want))
stream = llm.generate(PROMPT, temp=0.0)
start = list(islice(stream, 10))
print(in_child(lambda: start + list(islice(stream, 10)) == want))
print(start + list(islice(stream, 10)) == want, llm.dge_stats.state)
"""
    assert run(code, zoo, tmp_path).splitlines() == ["True", "True", "True evicted"]


@needs_fork
def test_forked_with_a_thread_that_selects(zoo: Zoo, tmp_path: Path) -> None:
    code = """
llm = new({"budget": 32, "draft_tokens": 3, "recall": 4, "recall_async": True})
want = answer(llm)
print(in_child(lambda: answer(llm) == want))
print(len(answer(llm)))
"""
    child, parent = run(code, zoo, tmp_path).splitlines()
    assert child.startswith("RuntimeError: this instance was in use by another thread") and parent == "20"


def test_spawned(zoo: Zoo, tmp_path: Path) -> None:
    code = """
import multiprocessing
if __name__ == "__main__":
    llm = new({"budget": 32, "draft_tokens": 3})
    want = answer(llm)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(answer, (llm,)) == want, llm.dge_stats.state)
"""
    assert run(code, zoo, tmp_path).splitlines() == ["True evicted"]
