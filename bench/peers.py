"""``python -m bench.peers MODEL``: this package beside NVIDIA/kvpress on the same weights, in f32.

Which entries SnapKV keeps, by both on the same tokens; then speed and memory, each library beside its own full cache.
The weights are dequantised first, since llama.cpp rounds activations where weights are quantised, and torch does not.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_dge import __version__
from llama_dge.benchmark.measure import load_average, prompt_tokens
from llama_dge.benchmark.workers import BenchError, Worker, turns
from llama_dge.cli._common import load_vocabulary, tokenize
from llama_dge.demo_text import chronicle

from . import peers_report
from ._common import ROOT, model_file, say
from .f32 import write_f32

PYTHON = ROOT / "build" / "peers-venv" / "bin" / "python"
SCRIPT = Path(__file__).with_name("peers_kvpress.py")
F32 = 0  # of enum ggml_type
#: window, kernel, budget: kvpress's defaults, and this package's
SETTINGS = ((64, 5, 256), (8, 7, 128))
PAGES = ("README.md", "docs/architecture.md", "docs/testing.md")


def dge(window: int, kernel: int, budget: int, pooling: str = "avg") -> dict[str, Any]:
    """Return the settings that mean SnapKV as kvpress has it: one eviction after the prompt, by the window alone."""
    return {
        "policy": "snapkv",
        "scores": "policy",
        "draft_tokens": 1,
        "window": window,
        "kernel_size": kernel,
        "budget": budget,
        "pooling": pooling,
        "park": "off",
    }


def prompts(path: Path, n: int) -> dict[str, list[int]]:
    """Return the first n tokens of some texts; raises BenchError where one is shorter."""
    vocabulary = load_vocabulary(path)
    texts = {"chronicle": chronicle(), **{page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}}
    found = {name: tokenize(vocabulary, text)[:n] for name, text in texts.items()}
    short = [f"{name} has {len(tokens)}" for name, tokens in found.items() if len(tokens) < n]
    if short:
        raise BenchError(f"--tokens {n}: {', '.join(short)}; take fewer")
    return found


def kept_by(worker: Worker, prompt: list[int]) -> tuple[list[list[list[int]]], list[float]]:
    """Return the entries that an arm keeps of a prompt, and the logits at its end."""
    worker("reset", prompt=prompt)
    worker("evaluate", start=0, stop=len(prompt))
    logits = worker("logits")
    worker("first")
    worker("step", n=1)
    return worker("kept"), logits


def kept_sets(args: argparse.Namespace, texts: dict[str, list[int]], models: dict[str, Path]) -> list[dict[str, Any]]:
    """Compare kept sets over all texts. Returns a row per setting and variant of ours, the comparison in f32 first."""
    rows = []
    context = {"n_ctx": -(-(args.tokens + 8) // 256) * 256, "n_threads": args.threads, "n_threads_batch": args.threads}
    with contextlib.ExitStack() as stack:
        theirs = Worker("kvpress", args.python, SCRIPT)
        stack.callback(theirs.close)
        theirs("load", model=str(models["file"]), n_threads=args.threads)
        ours = Worker("llama-dge", sys.executable)
        stack.callback(ours.close)
        for i, (window, kernel, budget) in enumerate(SETTINGS):
            theirs("set_press", record=True, window=window, kernel=kernel, budget=budget)
            wanted = {name: kept_by(theirs, tokens) for name, tokens in texts.items()}
            variants: list[tuple[str, str, dict[str, Any]]] = [("f32", "f32", {"type_k": F32, "type_v": F32})]
            if i == 0:  # what the differences would be otherwise
                variants += [("the file as it is, f16 cache", "file", {}), ("f32, pooling max", "f32", variants[0][2])]
            for variant, model, cache in variants:
                settings = dge(window, kernel, budget, "max" if "max" in variant else "avg")
                ours("load", model=str(models[model]), dge=settings, **context, **cache)
                found = {name: kept_by(ours, tokens) for name, tokens in texts.items()}
                row: dict[str, Any] = {
                    "window": window,
                    "kernel": kernel,
                    "budget": budget,
                    "variant": variant,
                    "texts": {},
                }
                for name, tokens in texts.items():
                    row["texts"][name] = {
                        "all": peers_report.overlaps(found[name][0], wanted[name][0]),
                        "past": peers_report.overlaps(found[name][0], wanted[name][0], len(tokens) - window),
                        "logits": max(abs(a - b) for a, b in zip(found[name][1], wanted[name][1])),
                    }
                rows.append(row)
                say(f"kept sets: window {window}, kernel {kernel}, {variant}")
    return rows


def speed(args: argparse.Namespace, models: dict[str, Path]) -> list[dict[str, Any]]:
    """Time a prompt of random tokens and the answer in both libraries, with and without SnapKV. Returns the rounds."""
    window, kernel, _ = SETTINGS[0]
    budget = args.budget
    n_ctx = -(-(args.context + args.blocks * 8 + 8) // 256) * 256
    ours = {"model": str(models["f32"]), "n_ctx": n_ctx, "n_threads": args.threads, "n_threads_batch": args.threads}
    ours.update({"type_k": F32, "type_v": F32, "flash_attn": args.flash_attn})
    theirs = {"model": str(models["file"]), "n_threads": args.threads}
    rounds: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, _, _ in peers_report.ARMS:
            peer = name.startswith("kvpress")
            workers[name] = Worker(name, args.python if peer else sys.executable, SCRIPT if peer else None)
            stack.callback(workers[name].close)
            evicts = name.endswith("snapkv")
            if peer:
                press = {"window": window, "kernel": kernel, "budget": budget} if evicts else {}
                about = workers[name]("load", **theirs, **press)
            else:
                about = workers[name]("load", dge=dge(window, kernel, budget) if evicts else None, **ours)
            n_vocab = about["n_vocab"]
        for i in range(args.rounds):
            start = time.monotonic()
            rounds.append(one_round(workers, prompt_tokens(args.context, n_vocab), args.blocks, i))
            say(f"speed, round {i + 1}: {time.monotonic() - start:.0f} s")
    return rounds


def one_round(workers: dict[str, Worker], prompt: list[int], blocks: int, index: int) -> dict[str, Any]:
    """Read the prompt once in each arm, then decode in turns. Returns seconds and bytes by arm."""
    load_before = load_average()
    found: dict[str, dict[str, Any]] = {name: {"decode": []} for name in workers}
    for order in turns(list(workers), 1, index):
        for name in order:
            worker = workers[name]
            worker("reset", prompt=prompt)
            found[name]["prefill"] = worker("evaluate", start=0, stop=len(prompt))
            worker("first")
            # the first step of ours evicts, kvpress did so in the prefill
            found[name]["step"] = worker("step", n=1)[0]
            worker("step", n=2)
            found[name]["memory"] = worker("memory")
            if name == "llama-dge snapkv":
                stats = worker("stats")
                if stats is None or stats["state"] != "evicted":
                    raise BenchError(f"nothing was evicted: {stats}")
                found[name]["eviction"] = stats
    for order in turns(list(workers), blocks, index):
        for name in order:
            steps = workers[name]("step", n=8)
            found[name]["decode"].append([sum(step[i] for step in steps) for i in range(2)])
    return {"load_average": [load_before, load_average()], "arms": found}


def write(path: Path, result: dict[str, Any]) -> None:
    """Write what is known so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"summary": peers_report.summary(result), **result}) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print. A target that is missed is no error."""
    p = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    p.add_argument("model", nargs="?", default="smollm2-135m", help="GGUF file, or a name of `llama-dge models list`")
    p.add_argument("--tokens", type=int, default=1024, metavar="N", help="of a text, for kept sets (1024)")
    p.add_argument("--context", type=int, default=2048, metavar="N", help="tokens of the prompt, for speed (2048)")
    p.add_argument(
        "--budget", type=int, default=512, metavar="N", help="entries kept per layer and KV head, for speed (512)"
    )
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="for speed; 0 leaves it out (3)")
    p.add_argument("--blocks", type=int, default=8, metavar="N", help="of 8 tokens that are decoded in turns (8)")
    p.add_argument("--threads", type=int, default=1, metavar="N")
    p.add_argument("--flash-attn", action="store_true", help="ours; torch chooses by itself")
    p.add_argument("--python", default=str(PYTHON), metavar="PYTHON", help="with kvpress (build/peers-venv)")
    default = ROOT / "build" / "bench-peers.json"
    p.add_argument("--json", type=Path, default=default, metavar="FILE", help="results (build/bench-peers.json)")
    args = p.parse_args(argv)
    largest = max(budget for _, _, budget in SETTINGS)
    if args.tokens <= largest or args.context <= args.budget:
        p.error(f"--tokens must be more than {largest}, --context more than --budget: else nothing would be evicted")
    if not Path(args.python).exists():
        p.error(f"{args.python} is not there: make bench-peers makes it, or --python names another")

    file = Path(model_file(args.model)).resolve()
    models = {"file": file, "f32": ROOT / "build" / "peers" / f"{file.stem}-f32.gguf"}
    models["f32"].parent.mkdir(parents=True, exist_ok=True)
    try:
        write_f32(file, models["f32"])
        settings = {k: v for k, v in vars(args).items() if k not in ("model", "json", "python")}
        result: dict[str, Any] = {"llama_dge": __version__, "model": file.name, "settings": settings}
        result["rounds"] = []
        result["kept"] = kept_sets(args, prompts(file, args.tokens), models)
        write(args.json, result)  # it took minutes, and the rest takes more
        result["rounds"] = speed(args, models) if args.rounds else []
    except BenchError as error:
        print(f"bench.peers: error: {error}", file=sys.stderr)
        return 1
    write(args.json, result)
    print(f"llama-dge {__version__}, {file.name}, {settings}\n")
    print(peers_report.table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
