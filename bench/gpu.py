"""``python -m bench.gpu --out FILE``: eviction on a GPU, with an 8B-shaped random model; part of scripts/gpu_check.sh.

For each number of tokens, type of cache and kind of attention: seconds of prefill, score, selection and compaction,
tokens per second of decoding on the full cache and after the eviction, memory of the device at each of these times.
With --dry-run, a tiny model on the CPU: nothing of it is a result, it shows that the measurement runs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import gguf

from llama_dge import Llama, __version__

from . import gpu_model
from ._common import ROOT, say

TYPES = {name: int(gguf.GGMLQuantizationType[name.upper()]) for name in ("f16", "q8_0")}
N_DECODE = 32


def device_memory() -> int | None:
    """Return the bytes that are in use on the first NVIDIA GPU, None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(run.stdout) * 2**20 if run.returncode == 0 else None


def speed(tokens: Any, n: int) -> float:
    """Return tokens per second of the next n tokens."""
    start = time.perf_counter()
    got = len(list(islice(tokens, n)))
    if got != n:
        raise SystemExit(f"bench.gpu: the answer ended after {got} of {n} tokens")
    return n / (time.perf_counter() - start)


def measure(path: Path, n_tokens: int, cache: str, flash_attn: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one setting.

    Parameters
    ----------
    path
        of the model
    n_tokens
        of the prompt
    cache
        type of K, and of V with flash attention
    flash_attn
        attention by one operation
    args
        of the command line
    """
    from llama_cpp import LogitsProcessorList  # not before llama_dge, which decides about its library

    llm = Llama(
        str(path),
        n_ctx=n_tokens + 3 * N_DECODE,
        n_batch=2048,
        n_ubatch=512,
        n_gpu_layers=0 if args.dry_run else 99,
        flash_attn=flash_attn,
        type_k=TYPES[cache],
        type_v=TYPES[cache if flash_attn else "f16"],
        dge={"budget": args.budget, "draft_tokens": 2},
        verbose=False,
    )
    rng = random.Random(1)
    prompt = [1, *(rng.randrange(3, gpu_model.N_VOCAB) for _ in range(n_tokens - 1))]
    figures: dict[str, Any] = {"tokens": n_tokens, "cache": cache, "flash_attn": flash_attn, "budget": args.budget}
    never = LogitsProcessorList([lambda _, scores: _without_end(scores)])

    # decoding on the full cache, with eviction off
    llm.set_dge(None)
    start = time.perf_counter()
    answer = llm.generate(prompt, temp=0.0, logits_processor=never)
    next(answer)
    figures["prefill_s"] = time.perf_counter() - start
    figures["decode_full_per_s"] = speed(answer, N_DECODE)
    figures["device_bytes_full"], figures["full"] = device_memory(), asdict(llm.dge_memory)
    answer.close()
    llm.reset()

    llm.set_dge({"budget": args.budget, "draft_tokens": 2})
    answer = llm.generate(prompt, temp=0.0, logits_processor=never)
    list(islice(answer, 3))  # the draft, and the token before which entries are evicted
    stats = llm.dge_stats
    assert stats is not None
    if stats.state != "evicted" or stats.rows_after >= stats.rows_before:
        raise SystemExit(f"bench.gpu: nothing was evicted: {stats.error or stats.state}")
    figures["eviction"] = {
        "rows_before": stats.rows_before,
        "rows_after": stats.rows_after,
        "score_s": stats.seconds_score,
        "select_s": stats.seconds_select,
        "compact_s": stats.seconds_compact,
        "park_s": stats.seconds_park,
    }
    figures["decode_evicted_per_s"] = speed(answer, N_DECODE)
    figures["device_bytes_evicted"], figures["after"] = device_memory(), asdict(llm.dge_memory)
    answer.close()
    llm.close()
    return figures


def _without_end(scores: Any) -> Any:
    scores[:3] = -float("inf")  # special tokens would end the answer
    return scores


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", required=True, help="JSON file that is written")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, a short prompt, on the CPU")
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="default 4096 8192 32768")
    parser.add_argument("--budget", type=int, default=None, help="entries kept per layer and KV head; default 1024")
    args = parser.parse_args(argv)
    args.budget = args.budget or (64 if args.dry_run else 1024)
    args.tokens = args.tokens or ([256] if args.dry_run else [4096, 8192, 32768])

    shape = gpu_model.TINY if args.dry_run else gpu_model.LLAMA_8B
    path = ROOT / "build" / f"random-{'tiny' if args.dry_run else '8b'}.gguf"
    if not path.exists():
        say(f"writing {path}")
        path.parent.mkdir(exist_ok=True)
        gpu_model.write(path.with_suffix(".part"), shape, 131072).rename(path)
    results = []
    for n_tokens in args.tokens:
        for cache, flash_attn in (("f16", False), ("f16", True), ("q8_0", True)):
            say(f"{n_tokens} tokens, {cache}, flash attention {'on' if flash_attn else 'off'}")
            results.append(measure(path, n_tokens, cache, flash_attn, args))
            # after each, as the time of a borrowed card may end
            out = {"version": __version__, "dry_run": args.dry_run, "shape": asdict(shape), "results": results}
            Path(args.out).write_text(json.dumps(out, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
