"""``llama-dge run``, ``doctor`` and ``demo``, and what the command says when it cannot."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import llama_dge
from llama_dge import Llama
from llama_dge.cli import _common, _parser, demo, main
from llama_dge.cli._common import CLIError
from llama_dge.cli._options import flash_attn_flags, resolve_model
from llama_dge.demo_text import FACTS, chronicle

if TYPE_CHECKING:
    from conftest import Zoo

DOCUMENT = chronicle(1)  # about 600 tokens of the tiny models, whose tokens are characters


@pytest.fixture
def model(zoo: Zoo) -> str:
    return str(zoo["g2"].path)


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT, encoding="utf-8")
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: str) -> tuple[int, str, str]:
        status = main(list(args))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def report_of(err: str) -> dict[str, str]:
    """Parse the lines "name    value" that `run` ends with."""
    return dict(re.split(r"  +", line, maxsplit=1) for line in err.splitlines() if "  " in line)


def answer_of(model: str, text: str, n: int, **settings: Any) -> tuple[str, Llama]:
    llm = Llama(model, n_ctx=1024, verbose=False, **settings)
    tokens = llm.tokenize(text.encode())
    pieces = [llm.detokenize([token]) for token in islice(llm.generate(tokens, temp=0.0), n)]
    return b"".join(pieces).decode("utf-8", "replace"), llm


def test_run(run: Callable[..., tuple[int, str, str]], model: str, document: str) -> None:
    status, out, err = run("run", model, "-f", document, "-p", "Who?", "--budget", "64", "--max-tokens", "12")
    assert status == 0
    text, llm = answer_of(model, f"{DOCUMENT}\n\nWho?", 12, dge={"budget": 64})
    assert out == text + "\n"

    stats = llm.dge_stats
    assert stats is not None and stats.state == "evicted"
    report = report_of(err)
    assert report["prompt"] == f"{stats.n_prompt} tokens"
    assert report["entries kept"].startswith(f"71 of {stats.rows_before} per KV head in {stats.n_layer} layers, ")
    assert report["entries attended"] == f"{stats.n_kv} at the end"
    assert re.fullmatch(r"[\d,]+\.\d tokens/s, \d+\.\d\d s", report["prefill"])
    assert re.fullmatch(r"[\d,]+\.\d tokens/s, \d+\.\d\d s \(11 tokens\)", report["decode"])
    assert re.fullmatch(r"score \d\.\d+ s, select \d\.\d+ s, compact \d\.\d+ s", report["eviction"])


def test_run_with_the_full_cache(run: Callable[..., tuple[int, str, str]], model: str, document: str) -> None:
    status, out, err = run("run", model, "-f", document, "--full", "--max-tokens", "12")
    assert status == 0
    text, llm = answer_of(model, DOCUMENT, 12)
    assert out == text + "\n"
    report = report_of(err)
    assert report["entries kept"] == f"all {llm.n_tokens}: eviction is off"
    assert "eviction" not in report


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--budget", "1000"], "the prompt is not longer than the budget"),
        (["--budget", "64", "--max-tokens", "2"], "the answer ended before the eviction"),
        (["--budget", "64", "--draft-tokens", "30"], "the answer ended before the eviction"),
    ],
    ids=str,
)
def test_run_says_why_nothing_was_evicted(
    run: Callable[..., tuple[int, str, str]], model: str, document: str, options: list[str], reason: str
) -> None:
    status, _, err = run("run", model, "-f", document, "--max-tokens", "12", *options)
    assert status == 0
    assert report_of(err)["entries kept"].endswith(f": {reason}")


@pytest.mark.parametrize(
    "options, settings",
    [
        (["--budget", "0.25"], {"budget": 0.25}),
        (["--budget", "64", "--draft-tokens", "4", "--window", "6"], {"budget": 64, "draft_tokens": 4, "window": 6}),
        (
            ["--policy", "streamingllm", "--budget", "40", "--sinks", "2"],
            {"policy": "streamingllm", "budget": 40, "sinks": 2},
        ),
        (
            ["--budget", "64", "--scores", "both", "--pooling", "avg", "--kernel-size", "3"],
            {"budget": 64, "scores": "both", "pooling": "avg", "kernel_size": 3},
        ),
        (
            ["--preset", "recall", "--budget", "0.1", "--recall-async"],
            {"recall": 4, "budget": 0.1, "recall_async": True},
        ),
        (
            ["--preset", "paper", "-k", "3", "--budget", "64", "--no-strict"],
            {"budget": 64, "draft_tokens": 3, "scores": "draft", "pooling": "none", "strict": False},
        ),
    ],
    ids=str,
)
def test_run_options_become_settings(
    run: Callable[..., tuple[int, str, str]],
    model: str,
    document: str,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    settings: dict[str, Any],
) -> None:
    made: list[Llama] = []

    class Spy(Llama):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(_common, "Llama", Spy)
    status, _, err = run("run", model, "-f", document, "--max-tokens", "12", *options)
    assert status == 0
    assert made[0].dge_config == llama_dge.DGEConfig(**settings)
    assert "eviction" in report_of(err)


def test_run_with_a_quantised_cache(run: Callable[..., tuple[int, str, str]], model: str, document: str) -> None:
    """--flash-attn follows from --type-v: llama.cpp quantises V only with it."""
    args = ["run", model, "-f", document, "--budget", "64", "--max-tokens", "12"]
    _, _, f16 = run(*args)
    status, _, q8_0 = run(*args, "--type-k", "q8_0", "--type-v", "q8_0")
    assert status == 0

    def kept_bytes(err: str) -> float:
        return float(report_of(err)["entries kept"].split()[-2])

    assert kept_bytes(q8_0) <= kept_bytes(f16)
    assert "eviction" in report_of(q8_0)


def test_run_reads_stdin(
    run: Callable[..., tuple[int, str, str]], model: str, document: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected, _ = run("run", model, "-f", document, "--budget", "64", "--max-tokens", "8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DOCUMENT.encode("utf-8"))))
    status, out, _ = run("run", model, "-f", "-", "--budget", "64", "--max-tokens", "8")
    assert status == 0 and out == expected


def test_run_samples_reproducibly(run: Callable[..., tuple[int, str, str]], model: str, document: str) -> None:
    args = ["run", model, "-f", document, "--budget", "64", "--max-tokens", "30", "--temp", "1.5", "--seed"]
    outputs = [run(*args, seed)[1] for seed in ("5", "5", "6")]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--budget", "5"], "budget=5: must be at least 8"),
        (["--budget", "0"], "budget=0: must be"),
        (["--budget", "1.5"], "budget=1.5: a float is a share"),
        (["--policy", "streamingllm", "--head-budgets", "adaptive"], 'head_budgets="adaptive": needs a policy'),
        (["--kernel-size", "4"], "kernel_size=4: must be odd"),
        (["--policy", "streamingllm", "--sinks", "1020"], "sinks=1020"),
        (["--full", "--budget", "64", "--draft-tokens", "3"], "--full excludes --budget, --draft-tokens"),
        (["--n-ctx", "256"], "do not fit into --n-ctx 256"),
        (["--chat"], "no chat template"),
        (["-f", "/does/not/exist"], "cannot read /does/not/exist"),
        (["--full", "--preset", "paper"], "--full excludes --preset"),
        (["--preset", "recall", "--scores", "policy"], 'scores="policy": must be "auto" or "draft" with recall=4'),
    ],
    ids=str,
)
def test_run_refuses(
    run: Callable[..., tuple[int, str, str]], model: str, document: str, options: list[str], message: str
) -> None:
    status, out, err = run("run", model, "-f", document, *options)
    assert (status, out) == (1, "")
    assert err.startswith("llama-dge run: error: ") and message in err
    assert len(err.splitlines()) == 1


def test_run_without_a_prompt(run: Callable[..., tuple[int, str, str]], model: str) -> None:
    status, _, err = run("run", model)
    assert status == 1 and "give a document with -f, a question with -p, or both" in err


def test_run_with_a_file_that_is_not_text(run: Callable[..., tuple[int, str, str]], model: str, tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9")
    status, _, err = run("run", model, "-f", str(path))
    assert status == 1 and f"cannot read {path}: " in err


def test_run_with_a_file_that_is_no_model(run: Callable[..., tuple[int, str, str]], document: str) -> None:
    status, _, err = run("run", document, "-p", "Who?")
    assert status == 1 and "is not a GGUF file" in err


@pytest.mark.parametrize("command", ["run", "doctor", "demo"])
def test_unknown_model(run: Callable[..., tuple[int, str, str]], command: str) -> None:
    status, _, err = run(command, "nope", *(["-p", "x"] if command == "run" else []))
    assert status == 1
    assert "nope: no such file, and no such model; the models are smollm2-135m" in err


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nope"],
        ["run"],
        ["run", "m", "--budget", "many"],
        ["run", "m", "--max-tokens", "0"],
        ["run", "m", "--max-tokens", "x"],
        ["run", "m", "--temp", "-1"],
        ["run", "m", "--temp", "nan"],
        ["run", "m", "--seed", "0"],  # llama_cpp.Llama would take it for "at random"
        ["run", "m", "--scores", "nope"],
        ["run", "m", "--preset", "nope"],
        ["run", "m", "-m", "m"],
        ["run", "-p", "Who?"],
        ["run", "m", "-fa", "maybe"],
        ["run", "m", "-c", "-1"],
        ["run", "m", "--park-limit", "much"],
        ["run", "m", "--policy", "nope"],
        ["run", "m", "--type-k", "q3_k"],
        ["run", "m", "--threads", "0"],
        ["models"],
        ["models", "get"],
        ["demo", "--fact", "0"],
    ],
    ids=" ".join,
)
def test_usage_errors(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "usage: llama-dge" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["run"], ["models"], ["models", "get"], ["doctor"], ["demo"]], ids=" ".join)
def test_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*args, "--help"])
    assert caught.value.code == 0
    assert "usage: llama-dge" in capsys.readouterr().out


def test_module_and_version() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "llama_dge", "--version"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, f"llama-dge {llama_dge.__version__}\n")


def test_reader_of_a_pipe_goes_away() -> None:
    command = f'"{sys.executable}" -m llama_dge models list | true; echo "${{PIPESTATUS[0]}}"'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr


def test_doctor(run: Callable[..., tuple[int, str, str]], model: str) -> None:
    status, out, _ = run("doctor", model)
    assert status == 0
    lines = report_of(out)
    assert lines["llama-dge"] == llama_dge.__version__
    assert lines["llama-cpp-python"] == "0.3.36"
    assert lines["library"] == llama_dge._library.LIBRARY._name
    assert lines["device"]
    assert lines["eviction"] == "supported: 3 layers with 2 KV heads"


def test_doctor_says_why_a_model_is_not_supported(
    run: Callable[..., tuple[int, str, str]], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_dge._native, "supported", lambda ctx: "it is a test")
    status, out, _ = run("doctor", model)
    assert status == 1
    assert report_of(out)["eviction"] == "not supported: it is a test"


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's document is too long for the tiny models."""
    monkeypatch.setattr(demo, "chronicle", lambda: DOCUMENT)


@pytest.mark.usefixtures("short_demo")
def test_demo(run: Callable[..., tuple[int, str, str]], model: str) -> None:
    status, out, _ = run("demo", model, "--budget", "64")
    assert status == 0
    lines = out.splitlines()
    assert lines[1].startswith("Settings    snapkv, scores=auto") and "budget=64" in lines[1]
    assert lines[2] == f"Question    {FACTS[1].question} ..."
    # the answers of a random model are wrong
    assert lines[3].startswith("Full cache  ") and lines[3].endswith(f"[wrong: it is {FACTS[1].answer}]")
    assert lines[4].startswith("Eviction    ") and lines[4].endswith(f"[wrong: it is {FACTS[1].answer}]")
    assert lines[5].strip().startswith("the first 4 tokens come from the full cache in any case: ")
    table = [re.split(r"  +", line.strip()) for line in lines[7:]]
    assert table[0] == ["full cache", "eviction"]
    cells = {row[0]: row[1:] for row in table[1:]}
    full_rows, rows = (int(cell.replace(",", "")) for cell in cells["entries per layer and KV head"])
    n_prompt = len(DOCUMENT) + len(FACTS[1].question) + 3  # BOS, two newlines
    assert full_rows == n_prompt + demo.MAX_TOKENS - 1
    assert rows == 64 + demo.MAX_TOKENS - 1
    assert {len(line) for line in lines[7:]} == {60}


@pytest.mark.usefixtures("short_demo")
def test_demo_that_evicts_nothing(run: Callable[..., tuple[int, str, str]], model: str) -> None:
    status, out, err = run("demo", model, "--budget", "2000")
    assert (status, out) == (1, "")
    assert "nothing was evicted: the prompt is not longer than the budget" in err


def test_demo_with_too_long_a_document(run: Callable[..., tuple[int, str, str]], model: str) -> None:
    status, _, err = run("demo", model)
    assert status == 1 and "do not fit into 4096" in err


@pytest.mark.model
def test_demo_with_the_real_model(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("demo")
    assert status == 0
    # the whole answer, most of it read from the kept entries; the recent entries alone do not hold it
    assert f"Full cache  {FACTS[1].answer}.    [right]" in out
    assert f"Eviction    {FACTS[1].answer}.    [right]" in out
    status, out, _ = run("demo", "--policy", "streamingllm")
    assert status == 0 and f"Eviction    {FACTS[1].answer}" not in out


def test_chronicle() -> None:
    text = chronicle()
    assert text == chronicle()
    assert 1500 < len(text.split()) < 2500
    places = [text.index(fact.sentence) / len(text) for fact in FACTS]
    assert places == sorted(places) and places[0] < 0.2 and places[-1] > 0.8
    for fact in FACTS:
        assert text.count(fact.answer) == 1
    sentences = [sentence for sentence in re.split(r"(?<=\.) |\n\n", text) if sentence]
    assert len(set(sentences)) == len(sentences) > 100


def test_options_are_not_abbreviated(
    run: Callable[..., tuple[int, str, str]], capsys: pytest.CaptureFixture[str], model: str, document: str
) -> None:
    with pytest.raises(SystemExit):
        run("run", model, "-f", document, "--k", "3")  # would be --kernel-size
    assert "unrecognized arguments: --k 3" in capsys.readouterr().err
    status, _, err = run(
        "run", model, "-f", document, "-k", "3", "--budget", "64", "--max-tokens", "6", "--threads", "1"
    )
    assert status == 0 and report_of(err)["entries kept"].startswith("66 of"), err  # with the draft's two


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"text", "is not a GGUF file"), (b"", "bad.gguf is empty"), (b"GGUF\3\0\0\0", "is the file complete?")],
)
def test_files_that_are_no_models(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, document: str, content: bytes, text: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    for args in (("run", str(path), "-f", document), ("doctor", str(path)), ("compare", str(path), "-f", document)):
        status, _, err = run(*args)
        assert status == 1 and (text in err or args[0] == "doctor")


def test_there_is_an_option_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(llama_dge.DGEConfig):
        assert f"--{field.name.replace('_', '-')}" in text
        assert f"{field.metadata['help']} ({field.default})" in text


def parsed(*args: str) -> dict[str, Any]:
    found = _parser().parse_args(flash_attn_flags(args))
    resolve_model(found)
    return {name: value for name, value in vars(found).items() if name not in ("model_option", "model_parser")}


ANSWERS = ("run x", "chat x", "inspect x")
MODELS = (*ANSWERS, "compare x -f d", "eval needle x --out o", "bench x", "demo x")


@pytest.mark.parametrize(
    "commands, theirs, ours",
    [
        (ANSWERS[:1], "-f d -p q", "--file d --prompt q"),
        ((*ANSWERS, "compare x -f d", "eval needle x --out o"), "-n 9", "--max-tokens 9"),
        ((*ANSWERS, "compare x -f d", "eval kld x -f d --out o"), "--n-predict 9", "--max-tokens 9"),
        (ANSWERS, "--temp 1.5 -s 3", "--temp 1.5 --seed 3"),
        ((*ANSWERS, "estimate x", "serve x"), "-c 768", "--n-ctx 768"),
        ((*ANSWERS, "estimate x", "serve x"), "--ctx-size 0", "--n-ctx 0"),
        ((*MODELS, "serve x"), "-t 2", "--threads 2"),
        (("estimate x -c 0",), "-b 64 -ub 32", "--n-batch 64 --n-ubatch 32"),
        (("estimate x -c 0",), "--batch-size 64 --ubatch-size 32", "--n-batch 64 --n-ubatch 32"),
        (MODELS[:-1], "-fa", "--flash-attn"),
        (MODELS[:-1], "-fa on -ctk q8_0 -ctv q8_0", "--flash-attn --type-k q8_0 --type-v q8_0"),
        (MODELS[:-1], "--flash-attn=off --cache-type-k f32", "--no-flash-attn --type-k f32"),
        (("estimate x -c 0", "serve x"), "-fa auto --cache-type-v q8_0", "--type-v q8_0"),
    ],
)
def test_spellings_of_llama_cpp(commands: tuple[str, ...], theirs: str, ours: str) -> None:
    for command in commands:
        assert parsed(*command.split(), *theirs.split()) == parsed(*command.split(), *ours.split())
        # the model as well, wherever it stands
        before, after = command.split(" x")
        assert parsed(*before.split(), *theirs.split(), *after.split(), "-m", "x") == parsed(
            *command.split(), *ours.split()
        )


@pytest.mark.parametrize("command", ["run", "chat", "inspect"])
def test_the_model_has_a_context_of_its_own(
    monkeypatch: pytest.MonkeyPatch, model: str, document: str, command: str
) -> None:
    asked: list[int] = []

    def load(path: Path, progress: Any, *, n_ctx: int, **settings: Any) -> None:
        asked.append(n_ctx)
        raise CLIError("it is a test")

    monkeypatch.setattr(sys.modules[f"llama_dge.cli.{command}"], "load", load)
    assert main([command, model, "-f", document, "-c", "0", *(["--json"] if command == "inspect" else [])]) == 1
    llm = Llama(model, n_ctx=0, verbose=False)
    assert asked == [llm.n_ctx()]
