"""``llama-dge estimate``: the memory that a model and a prompt will need, before any weights are loaded."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp._utils import suppress_stdout_stderr

from .. import _native
from ..config import DGEConfig
from ..stats import DGEEstimate
from ._common import CLIError, Progress, mebibytes, model_path
from ._options import (
    add_cache_options,
    add_context,
    add_dge_options,
    add_full,
    add_model,
    add_verbose,
    at_least,
    cache_settings,
    wanted_dge,
)

_ANSWER = 256  # tokens that --n-prompt leaves free by default


@dataclass(frozen=True)
class Estimate:
    """Bytes that `Llama` will use.

    Parameters
    ----------
    n_ctx, n_prompt
        Cells at full size, tokens of the prompt.
    rows, rows_after
        Entries per layer and KV head just before and just after the eviction.
    at_most
        Whether `rows_after` and all that follows from it is an upper bound: heads share entries by their scores.
    reason
        Why nothing will be evicted, or None.
    weights
        The model.
    kv_full, kv_peak, kv_after
        The cache at `n_ctx`, while the prompt is evaluated, and after the eviction.
    other
        Sliding-window caches and recurrent states.
    compute_peak, compute_after
        Buffers of the graphs, with the cache of each time. `compute_peak` is an upper bound with H2O's sums and flash
        attention.
    dge
        Queries, sums and biases.
    parked
        The host copy.
    parked_in
        "ram", "disk" or "off".
    parallel
        Conversations at once, which share the cache: all numbers of bytes are of all of them.
    """

    n_ctx: int
    n_prompt: int
    rows: int
    rows_after: int
    at_most: bool
    reason: str | None
    weights: int
    kv_full: int
    kv_peak: int
    kv_after: int
    other: int
    compute_peak: int
    compute_after: int
    dge: int
    parked: int
    parked_in: str
    parallel: int = 1

    @property
    def total_peak(self) -> int:
        """Bytes while a prompt is evaluated; of that one there is no host copy then."""
        others = self.parked * (self.parallel - 1) // self.parallel if self.parked_in == "ram" else 0
        return self.weights + self.kv_peak + self.other + self.compute_peak + self.dge + others

    @property
    def total_after(self) -> int:
        """Bytes after the eviction, in memory."""
        parked = self.parked if self.parked_in == "ram" else 0
        return self.weights + self.kv_after + self.other + self.compute_after + self.dge + parked


class _Simulated:
    """A model without weights, on which contexts are made that allocate nothing."""

    def __init__(self, path: Path, n_batch: int, n_ubatch: int) -> None:
        self._n_batch, self._n_ubatch = n_batch, n_ubatch
        params = llama_cpp.llama_model_default_params()
        params.no_alloc = True
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE  # a mapping would be one of weights
        with suppress_stdout_stderr(disable=False):
            self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise CLIError(f"Failed to load model from file: {path}")

    def close(self) -> None:
        llama_cpp.llama_model_free(self.model)

    @contextlib.contextmanager
    def context(self, n_ctx: int, cache: dict[str, Any]) -> Iterator[Any]:
        """Make a context as `llama_cpp.Llama` would; raises CLIError."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = min(n_ctx, self._n_batch)
        params.n_ubatch = min(params.n_batch, self._n_ubatch)
        params.type_k, params.type_v = cache["type_k"], cache["type_v"]
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if cache["flash_attn"] else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        with suppress_stdout_stderr(disable=False):
            ctx = llama_cpp.llama_init_from_model(self.model, params)
        if not ctx:
            raise CLIError("a context with these settings cannot be made")
        try:
            yield ctx
        finally:
            llama_cpp.llama_free(ctx)

    def compute(self, n_ctx: int, n_cells: int, cache: dict[str, Any]) -> int:
        """Measure the buffers of the graphs of a context whose cache has so many cells now; raises CLIError."""
        n_tokens = min(n_ctx, self._n_batch, self._n_ubatch)
        with self.context(n_cells, cache) as ctx:
            # llama.cpp makes no micro-batch larger than the cache, but an elastic one was larger before
            return _native.memory(ctx).compute * n_tokens // min(n_tokens, n_cells)


def estimate(
    path: Path,
    config: DGEConfig | None,
    *,
    n_ctx: int,
    n_prompt: int | None = None,
    n_batch: int = 512,
    n_ubatch: int = 512,
    parallel: int = 1,
    cache: dict[str, Any],
) -> Estimate:
    """Predict the memory of a model and of a prompt.

    Parameters
    ----------
    path
        GGUF file.
    config
        Eviction, or None.
    n_ctx, n_batch, n_ubatch
        As for `Llama`; `n_ctx` 0 is what the model was trained for.
    n_prompt
        Tokens of the prompt; None leaves 256 for the answer.
    parallel
        Conversations that a server answers at once: each has such a prompt. One is evaluated while the others are
        evicted, which is the peak.
    cache
        "flash_attn", "type_k" and "type_v", as for `Llama`.

    Raises
    ------
    CLIError
        The file is no model, or the settings do not fit it.
    """
    simulated = _Simulated(path, n_batch, n_ubatch)
    try:
        n_ctx = n_ctx or llama_cpp.llama_model_n_ctx_train(simulated.model)
        if n_prompt is None:
            n_prompt = max(n_ctx - _ANSWER, n_ctx // 2, 1)
        if n_prompt > n_ctx:
            raise CLIError(f"--n-prompt {n_prompt} does not fit into --n-ctx {n_ctx}")
        with simulated.context(n_ctx, cache) as ctx:
            memory = _native.memory(ctx)
            found = _prompt(ctx, config, n_prompt)
        others = parallel - 1
        n_cells, n_cells_after = found.n_cells + others * found.n_cells_after, parallel * found.n_cells_after
        compute_peak = simulated.compute(n_ctx, n_cells, cache)
        compute_after = simulated.compute(n_ctx, n_cells_after, cache)
        if cache["flash_attn"]:
            compute_peak += found.compute
            if found.at_most:  # flash attention cannot take a mask per head
                plain = {"flash_attn": False, "type_k": 1, "type_v": 1}
                compute_after = max(compute_after, simulated.compute(n_ctx, n_cells_after, plain))
    finally:
        simulated.close()
    return Estimate(
        n_ctx=memory.n_cells * parallel,
        n_prompt=n_prompt,
        rows=found.n_rows,
        rows_after=found.n_rows_after,
        at_most=found.at_most,
        reason=found.reason,
        weights=memory.weights,
        kv_full=memory.kv * parallel,
        kv_peak=found.kv + others * found.kv_after,
        kv_after=parallel * found.kv_after,
        other=memory.other * parallel,
        compute_peak=compute_peak,
        compute_after=compute_after,
        dge=found.dge * parallel,
        parked=found.parked * parallel,
        parked_in=config.parks if config is not None and found.reason is None else "off",
        parallel=parallel,
    )


def _prompt(ctx: Any, config: DGEConfig | None, n_prompt: int) -> DGEEstimate:
    """Ask the library what a prompt will need; raises CLIError."""
    memory = _native.memory(ctx)
    reason = "eviction is off" if config is None else _native.supported(ctx)
    if config is None or reason is not None:
        return DGEEstimate(
            n_rows=n_prompt,
            n_rows_after=n_prompt,
            at_most=False,
            n_cells=memory.n_cells,
            n_cells_after=memory.n_cells,
            kv=memory.kv,
            kv_after=memory.kv,
            kv_max=memory.kv,
            compute=0,
            dge=0,
            parked=0,
            reason=reason,
        )
    try:
        with suppress_stdout_stderr(disable=False):
            return _native.estimate(ctx, config, n_prompt, config.elastic)
    except (ValueError, _native.DGEError) as error:
        raise CLIError(str(error)) from error


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "estimate",
        help="the memory that a model and a prompt will need",
        description="Loads no weights. Prints weights, cache before and after the eviction, and buffers.",
    )
    add_model(parser)
    add_context(parser, "", required=True)
    parser.add_argument("--n-prompt", type=at_least(1), metavar="N", help=f"tokens of the prompt (N_CTX - {_ANSWER})")
    for letter, name, text in (("b", "batch", "a batch"), ("ub", "ubatch", "a micro-batch")):
        parser.add_argument(
            f"-{letter}",
            f"--n-{name}",
            f"--{name}-size",
            type=at_least(1),
            default=512,
            metavar="N",
            help=f"tokens of {text} (512)",
        )
    parser.add_argument(
        "-np", "--parallel", type=at_least(1), default=1, metavar="N", help="conversations at once, as of serve (1)"
    )
    add_cache_options(parser)
    add_full(parser)
    parser.add_argument("--json", action="store_true", help="bytes, for programs")
    add_dge_options(parser, DGEConfig())
    add_verbose(parser)
    parser.set_defaults(command_function=_estimate)


def _estimate(args: argparse.Namespace) -> int:
    config = wanted_dge(args, DGEConfig())
    path = model_path(args.model, Progress(args.verbose))
    result = estimate(
        path,
        config,
        n_ctx=args.n_ctx,
        n_prompt=args.n_prompt,
        n_batch=args.n_batch,
        n_ubatch=args.n_ubatch,
        parallel=args.parallel,
        cache=cache_settings(args),
    )
    if args.json:
        totals = {"total_peak": result.total_peak, "total_after": result.total_after}
        print(json.dumps({**asdict(result), **totals}, indent=1))
        return 0
    for name, value in _table(result):
        print(f"{name:<32}{value}")
    return 0


def _table(e: Estimate) -> Iterator[tuple[str, str]]:
    most = "at most " if e.at_most else ""
    yield "prompt", f"{e.n_prompt:,} tokens" + (f", {e.parallel} conversations at once" if e.parallel > 1 else "")
    if e.reason is None:
        yield "entries", f"{e.rows:,} -> {most}{e.rows_after:,} per layer and KV head"
    else:
        yield "entries", f"{e.rows:,}, nothing is evicted: {e.reason}"
    yield "weights", mebibytes(e.weights)
    yield f"KV cache for {e.n_ctx:,} cells", mebibytes(e.kv_full)
    yield "KV cache before the eviction", mebibytes(e.kv_peak)
    yield "KV cache after the eviction", most + mebibytes(e.kv_after)
    if e.other:
        yield "other caches", mebibytes(e.other)
    yield "compute before the eviction", mebibytes(e.compute_peak)
    yield "compute after the eviction", most + mebibytes(e.compute_after)
    yield "eviction buffers", mebibytes(e.dge)
    yield "host copy", f"{mebibytes(e.parked)} ({e.parked_in})"
    yield "in memory before the eviction", mebibytes(e.total_peak)
    yield "in memory after the eviction", most + mebibytes(e.total_after)
