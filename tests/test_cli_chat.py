"""``llama-dge chat``: turns, commands, interrupts, on tiny models."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llama_dge import Llama
from llama_dge.cli import _conversation, chat, main
from llama_dge.demo_text import chronicle
from llama_dge.models import fetch, read_manifest

if TYPE_CHECKING:
    from conftest import Zoo

DOCUMENT = chronicle(1)  # about 600 tokens of the tiny models, whose tokens are characters
OPTIONS = ["--budget", "64", "--max-tokens", "12", "--threads", "1"]


@pytest.fixture
def model(zoo: Zoo) -> str:
    return str(zoo["g2"].path)


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT, encoding="utf-8")
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], model: str, document: str) -> Callable[..., tuple[int, str, str]]:
    def run(*args: str, asks: tuple[str, ...] = ()) -> tuple[int, str, str]:
        prompts = [part for ask in asks for part in ("-p", ask)]
        status = main(["chat", model, "-f", document, *OPTIONS, *args, *prompts])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def tables(out: str) -> list[dict[str, str]]:
    """The tables that /stats printed."""
    found: list[dict[str, str]] = []
    for name, value in re.findall(r"^(\w[\w ]*?)  +(.*)$", out, flags=re.MULTILINE):
        if name == "prompt":
            found.append({})
        if found:
            found[-1][name] = value
    return found


def numbers(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", text)]


def test_three_turns_restore_what_was_evicted(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run(asks=("Who?", "/stats", "And when?", "/stats", "Where?", "/stats"))
    assert status == 0
    turns = tables(out)
    assert len(turns) == 3
    prompts = [numbers(turn["prompt"]) for turn in turns]
    assert prompts[0][0] == prompts[0][1] > 580
    before = 0
    for turn, (n_prompt, n_evaluated) in zip(turns, prompts):
        assert numbers(turn["entries kept"])[:2] == [71, n_prompt + 7]
        assert numbers(turn["entries parked"]) == [n_prompt + 7]
        (restored,) = numbers(turn["entries restored"])
        assert (restored > 0) == (before > 0) and restored + n_evaluated >= n_prompt
        if before:
            assert restored >= before and n_evaluated < 0.15 * n_prompt
        before = n_prompt
        assert float(turn["KV cache"].split()[0]) < 0.2 * float(turn["KV cache"].split()[3])
        assert turn["host copy"].endswith("(ram)") and float(turn["host copy"].split()[0]) > 0


def test_answers_equal_those_of_the_class(run: Callable[..., tuple[int, str, str]], model: str) -> None:
    _, out, err = run("--n-ctx", "2048", asks=("Who?", "And when?"))
    llm = Llama(model, n_ctx=2048, n_threads=1, verbose=False, dge={"budget": 64})
    messages: list[Any] = []
    for question in (f"{DOCUMENT}\n\nWho?", "And when?"):
        messages.append({"role": "user", "content": question})
        reply = llm.create_chat_completion(messages, max_tokens=12, temperature=0.0)["choices"][0]
        messages.append({"role": "assistant", "content": reply["message"]["content"]})
    assert out == "".join(m["content"] + "\n" for m in messages if m["role"] == "assistant")
    assert "the model has no chat template, so Llama 2's is used" in err
    assert err.count("[--max-tokens 12]") == 2


def test_stdin(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(asks=("Who?", "And when?"))[1]
    text = "Who?\n\nAnd when?\n/nonsense\n/quit\nnever asked\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    status, out, err = run()
    assert status == 0 and out == expected
    assert "no command /nonsense; /help lists them" in err


def test_terminal(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    typed = iter(["Who?", KeyboardInterrupt(), "/help", EOFError()])

    def ask(prompt: str) -> str:
        assert prompt == "> "
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    expected = run(asks=("Who?",))[1]
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    status, out, _ = run()
    assert status == 0 and out.startswith(expected) and "/regenerate" in out


def test_progress_leaves_the_answer_alone(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal both go to the same lines."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(chat, "_write", screen.write)
    monkeypatch.setattr(_conversation, "_SLOW", 0.0)
    assert run(asks=("Who?",))[0] == 0
    text = screen.getvalue()
    assert "prefill 512 of " in text
    assert "\x1b[K" not in text[text.rindex("\r") + len("\r\x1b[K") :] and "[--max-tokens 12]" in text.split("\r")[-1]
    assert len(text.split("\x1b[K")[-1].splitlines()[0]) >= 12


def test_commands_that_change_the_conversation(run: Callable[..., tuple[int, str, str]]) -> None:
    first, second = run(asks=("Who?", "When?"))[1].splitlines()
    assert run(asks=("Who?", "What?", "/undo", "When?"))[1].splitlines()[2] == second
    assert run(asks=("Who?", "When?", "/reset", "Who?"))[1].splitlines()[2] == first
    assert run(asks=("Who?", "/regenerate", "When?"))[1].splitlines() == [first, first, second]
    lines = run("--seed", "3", asks=("Who?", "/regenerate 2", "/regenerate 2"))[1].splitlines()
    assert len(set(lines)) == 3
    assert lines[0] == first


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as a terminal's; a background job of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("end", [1, 3, 8])
def test_interrupted_answer_stays(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    messages: list[Any] = []
    made: list[Any] = []

    def write(text: str) -> None:
        sys.stdout.write(text)
        made.append(text)
        if len(made) == end:
            os.kill(os.getpid(), signal.SIGINT)

    create = _conversation.ChatLlama.create_chat_completion

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        messages[:] = kwargs["messages"]
        return create(self, *args, **kwargs)

    monkeypatch.setattr(chat, "_write", write)
    monkeypatch.setattr(_conversation.ChatLlama, "create_chat_completion", spy)
    status, _, err = run(asks=("Who?", "And when?", "/stats"))
    assert status == 0 and err.count("[interrupted]") == 1
    assert messages[1] == {"role": "assistant", "content": "".join(made[:end])}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupted_prefill_is_not_lost(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    n_evals = [0]
    step = Llama.eval

    def evaluate(self: Any, tokens: Any) -> None:
        step(self, tokens)
        n_evals[0] += 1
        if n_evals[0] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Llama, "eval", evaluate)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\nWho?\n/stats\n"))
    status, out, err = run()
    assert status == 0 and "interrupted before the answer began: the question is forgotten" in err
    monkeypatch.setattr(Llama, "eval", step)
    (table,) = tables(out)
    n_prompt, n_evaluated = numbers(table["prompt"])
    assert n_evaluated == n_prompt - 512  # the batch that was done is still there
    assert out.splitlines()[0] == run(asks=("Who?",))[1].splitlines()[0]


def test_a_failed_regenerate_keeps_the_old_answer(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = _conversation.ChatLlama(str(zoo["g2"].path), dge={"budget": 64}, n_ctx=1024, n_threads=1, verbose=False)
    talk = _conversation.Conversation(llm, None, max_tokens=8, temp=0.0, seed=1)
    for _ in range(2):
        talk.ask("Who?", lambda text: None)
    before = list(talk._messages)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("llama_decode returned 1")

    monkeypatch.setattr(llm, "generate", fail)
    with pytest.raises(_conversation.CLIError, match="llama_decode returned 1"):
        talk.regenerate(lambda text: None)
    assert talk._messages == before and len(talk) == 2
    llm.close()


def test_context_that_is_full(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = run("--n-ctx", "700", asks=("Who?", "x" * 200))
    assert status == 1
    assert re.search(r"the conversation has \d+ tokens and does not fit into --n-ctx 768; ", err)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n" + "x" * 200 + "\nWhen?\n/stats\n"))
    status, out, err = run("--n-ctx", "700")
    assert status == 0 and "does not fit into --n-ctx 768" in err
    assert len(tables(out)) == 1 and numbers(tables(out)[0]["entries restored"])[0] > 580
    assert "[--n-ctx 768 is full]" in run("--n-ctx", "700", "--max-tokens", "500", asks=("Who?",))[2]


def test_full_cache(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("--n-ctx", "1024", asks=("/stats",))
    assert status == 0 and tables(out)[0]["entries kept"].endswith("nothing was asked yet")
    status, _, err = run("--full", asks=("Who?",))
    assert status == 1 and "--full excludes --budget" in err


def test_options_of_the_park(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    folder = tmp_path / "park"
    folder.mkdir()
    _, out, _ = run("--park", "disk", "--park-dir", str(folder), "--no-elastic", asks=("Who?", "When?", "/stats"))
    (table,) = tables(out)
    assert table["host copy"].endswith("(disk)") and numbers(table["entries restored"])[0] > 580
    assert table["KV cache"].split()[0] == table["KV cache"].split()[3]
    assert list(folder.iterdir()) == []
    _, out, _ = run("--new-turn", "reprefill", asks=("Who?", "When?", "/stats"))
    (table,) = tables(out)
    assert numbers(table["entries restored"]) == [0] and table["host copy"] == "0.0 MiB (off)"
    with pytest.warns(RuntimeWarning, match="failed"):
        status, out, _ = run("--park-limit", "1000", asks=("Who?", "/stats"))
    assert status == 0 and "the host copy could not be made" in tables(out)[0]["entries kept"]


@pytest.mark.parametrize(
    "asks, message",
    [
        (("/undo",), "there is no question yet"),
        (("/regenerate",), "there is no question yet"),
        (("Who?", "/regenerate hot"), "hot is not a temperature in 0 .. 100"),
        (("/stats now",), "/stats takes no now"),
        (("/regenerate 1 2",), "/regenerate takes no 2"),
    ],
    ids=str,
)
def test_wrong_commands(run: Callable[..., tuple[int, str, str]], asks: tuple[str, ...], message: str) -> None:
    status, _, err = run(asks=asks)
    assert status == 1 and f"llama-dge chat: error: {message}\n" in err


@pytest.mark.parametrize(
    "args, message",
    [
        (["-f", "-"], "the document comes from stdin, so ask with -p"),
        (["--n-ctx", "100"], "tokens and does not fit into --n-ctx 100"),
        (["-f", "/does/not/exist"], "cannot read /does/not/exist"),
    ],
    ids=str,
)
def test_refusals(run: Callable[..., tuple[int, str, str]], args: list[str], message: str) -> None:
    status, out, err = run(*args)
    assert (status, out) == (1, "") and message in err


@pytest.mark.model
@pytest.mark.slow
def test_a_real_conversation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Three turns over a document of some 4,000 tokens."""
    path = tmp_path / "chronicle.txt"
    path.write_text(chronicle(34), encoding="utf-8")
    asks = [part for ask in ("Who lived there?", "When was that?", "Why?") for part in ("-p", ask, "-p", "/stats")]
    model = str(fetch(read_manifest()["smollm2-135m"]))
    assert main(["chat", model, "-f", str(path), "--flash-attn", "--budget", "512", "--max-tokens", "16", *asks]) == 0
    turns = tables(capsys.readouterr().out)
    assert len(turns) == 3 and numbers(turns[0]["prompt"])[0] > 3500
    for turn in turns[1:]:
        n_prompt, n_evaluated = numbers(turn["prompt"])
        assert numbers(turn["entries restored"])[0] > 3500 and n_evaluated < 0.05 * n_prompt
