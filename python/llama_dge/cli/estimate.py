"""``llama-dge estimate``: the memory that a model and a prompt will need, before any weights are loaded."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp._utils import suppress_stdout_stderr

from .. import _native
from ..config import DGEConfig
from ._common import CLIError, Progress, mebibytes, model_path
from ._options import (
    add_cache_options,
    add_dge_options,
    add_full,
    add_model,
    add_verbose,
    at_least,
    cache_settings,
    wanted_dge,
)

_ANSWER = 256  # tokens that --n-prompt leaves free by default
_CELLS_PAD, _CELLS_SPARE = 256, 128  # llama_dge::shrunk_size in native/src/llama-dge-memory.cpp
_SUMS_BLOCK = 24 * 2**20  # LLAMA_DGE_SUMS_BLOCK
_PARKED_ROW = 12  # bytes of a cell's extra data: llama_kv_cell_ext


@dataclass(frozen=True)
class Estimate:
    """Bytes that `Llama` will use.

    Parameters
    ----------
    n_ctx, n_prompt
        Cells at full size, tokens of the prompt.
    rows, rows_after
        Rows per layer and KV head just before and just after the cut.
    at_most
        Whether `rows_after` and all that follows from it is an upper bound: heads share rows by their scores.
    reason
        Why nothing will be cut, or None.
    weights
        The model.
    kv_full, kv_peak, kv_after
        The cache at `n_ctx`, while the prompt is evaluated, and after the cut.
    other
        Sliding-window caches and recurrent states.
    compute_peak, compute_after
        Buffers of the graphs, with the cache of each time. At most so much for h2o's own score and flash attention.
    dge
        Queries, sums, and biases of the cut.
    parked
        Rows that wait for a later prompt.
    parked_in
        "ram", "disk" or "off".
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

    @property
    def total_peak(self) -> int:
        """Bytes while the prompt is evaluated; nothing is parked then."""
        return self.weights + self.kv_peak + self.other + self.compute_peak + self.dge

    @property
    def total_after(self) -> int:
        """Bytes after the cut, in memory."""
        parked = self.parked if self.parked_in == "ram" else 0
        return self.weights + self.kv_after + self.other + self.compute_after + self.dge + parked


class _Simulated:
    """A model without weights, on which contexts are made that allocate nothing."""

    def __init__(self, path: Path) -> None:
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
    def context(self, n_ctx: int, n_batch: int, n_ubatch: int, cache: dict[str, Any]) -> Iterator[Any]:
        """Make a context as `llama_cpp.Llama` would; raises CLIError."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = min(n_ctx, n_batch)
        params.n_ubatch = min(params.n_batch, n_ubatch)
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


def estimate(
    path: Path,
    config: DGEConfig | None,
    *,
    n_ctx: int,
    n_prompt: int,
    n_batch: int = 512,
    n_ubatch: int = 512,
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
        As for `Llama`.
    n_prompt
        Tokens of the prompt.
    cache
        "flash_attn", "type_k" and "type_v", as for `Llama`.

    Raises
    ------
    CLIError
        The file is no model, or the settings do not fit it.
    """
    simulated = _Simulated(path)
    try:
        n_head = llama_cpp.llama_model_n_head(simulated.model)

        n_tokens = min(n_ctx, n_batch, n_ubatch)

        def compute(n_cells: int, cache: dict[str, Any] = cache) -> int:
            with simulated.context(n_cells, n_batch, n_ubatch, cache) as ctx:
                # llama.cpp makes no micro-batch larger than the cache, but an elastic one was larger before
                return _native.memory(ctx).compute * n_tokens // min(n_tokens, n_cells)

        with simulated.context(n_ctx, n_batch, n_ubatch, cache) as ctx:
            full = _native.memory(ctx)
            reason = "eviction is off" if config is None else _native.supported(ctx)
            heads: list[int] = []
            if config is not None and reason is None:
                heads = [_native.n_head_kv(ctx, layer) for layer in _native.layers(ctx)]
                full = replace(full, dge=_own_bytes(ctx, config))
        rows, rows_after, at_most = n_prompt, n_prompt, False
        if config is not None and reason is None:
            rows = rows_after = n_prompt + config.draft_tokens - 1
            if _budget(config, n_prompt) < n_prompt:
                kept, at_most = _rows_kept(config, n_prompt, heads)
                # rows of the answer compete with the prompt's where they are chosen again
                rows_after = kept if config.refresh else kept + config.draft_tokens - 1
            else:
                reason = "the prompt is not longer than the budget"

        n_peak = n_after = full.n_cells
        # caches that cannot be cut are not elastic either
        if config is not None and config.elastic and heads:
            n_peak = _native.elastic_cells(rows, full.n_cells)
            n_after = n_peak
            if rows_after < rows:
                n_after = min(-(-(rows_after + _CELLS_SPARE) // _CELLS_PAD) * _CELLS_PAD, n_peak)
        compute_peak, compute_after = compute(n_peak), compute(n_after)
        if config is not None and heads and cache["flash_attn"]:
            if _sums(config):
                compute_peak += min(4 * n_peak * n_tokens * n_head, _SUMS_BLOCK)
            if at_most:  # a mask per head is not for flash attention
                compute_after = max(compute_after, compute(n_after, {"flash_attn": False, "type_k": 1, "type_v": 1}))
    finally:
        simulated.close()

    cell = full.kv // full.n_cells
    is_cut = rows_after < rows
    dge, parked = full.dge, 0
    if is_cut and config is not None:
        dge += _bias_rows(config, n_prompt, heads, n_head) * 4 * full.n_cells
        if config.parks != "off":
            sums = 4 * sum(heads) if _sums(config) else 0
            parked = rows * (cell + _PARKED_ROW + sums) + full.other
    return Estimate(
        n_ctx=full.n_cells,
        n_prompt=n_prompt,
        rows=rows,
        rows_after=rows_after,
        at_most=at_most,
        reason=reason,
        weights=full.weights,
        kv_full=full.kv,
        kv_peak=cell * n_peak,
        kv_after=cell * n_after,
        other=full.other,
        compute_peak=compute_peak,
        compute_after=compute_after,
        dge=dge,
        parked=parked,
        parked_in=config.parks if config is not None and is_cut else "off",
    )


def _own_bytes(ctx: Any, config: DGEConfig) -> int:
    try:
        with suppress_stdout_stderr(disable=False):
            callback = _native.enable(ctx, config)
    except (ValueError, _native.DGEError) as error:
        raise CLIError(str(error)) from error
    del callback  # nothing is decoded
    return _native.memory(ctx).dge


def _sums(config: DGEConfig) -> bool:
    return config.policy == "h2o" and config.scores != "draft"


def _budget(config: DGEConfig, n_prompt: int) -> int:
    """Rows of the prompt that stay on average, as llama_dge::resolve_budget has it."""
    if not isinstance(config.budget, float):
        return int(config.budget)
    least = config.window + (max(config.sinks, 1) if config.policy == "streamingllm" else 1)
    return max(math.floor(config.budget * n_prompt + 0.5), least)


def _first_layer(config: DGEConfig, n_prompt: int, n_layer: int) -> int:
    """Past rows of a head of the layer with the most: native/src/policies/pyramidkv.cpp."""
    n_past = n_prompt - config.window
    n_cap = _budget(config, n_prompt) - config.window
    if config.policy != "pyramidkv" or n_layer < 2 or n_prompt < 2 * n_cap:
        return n_cap
    if config.layer_budgets == "reference":
        return min(2 * n_cap - n_cap // 20, n_past)
    first = min(2 * n_cap - Fraction(n_cap, 20), Fraction(n_past))
    step = 2 * (first - n_cap) / (n_layer - 1)
    line = [first - i * step for i in range(n_layer)]
    missing = n_cap * n_layer - sum(math.floor(x) for x in line)
    before = sum(x % 1 > first % 1 for x in line)  # the largest remainders are rounded up
    return math.floor(first) + (before < missing)


def _rows_kept(config: DGEConfig, n_prompt: int, heads: Sequence[int]) -> tuple[int, bool]:
    """Rows of the prompt in the head with the most, and whether it may be fewer."""
    n_cap = _first_layer(config, n_prompt, len(heads))
    if config.head_budgets != "adaptive" or max(heads) == 1:
        return n_cap + config.window, False
    # one head may have all of the layer's best scores
    n_head = max(heads)
    return min((8 * n_cap * n_head + 5) // 10 + n_cap // 5 + 1, n_prompt - config.window) + config.window, True


def _bias_rows(config: DGEConfig, n_prompt: int, heads: Sequence[int], n_head: int) -> int:
    """Rows of -inf that hide unused cells, of all layers together."""
    if config.head_budgets == "adaptive" and max(heads) > 1:
        return n_head * len(heads)
    is_even = _first_layer(config, n_prompt, len(heads)) == _budget(config, n_prompt) - config.window
    return 0 if is_even else len(heads) - 1


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of the program."""
    parser = commands.add_parser(
        "estimate",
        help="the memory that a model and a prompt will need",
        description="Loads no weights. Prints weights, cache before and after the cut, and buffers.",
    )
    add_model(parser)
    parser.add_argument("--n-ctx", type=at_least(1), required=True, metavar="N", help="context")
    parser.add_argument("--n-prompt", type=at_least(1), metavar="N", help=f"tokens of the prompt (N_CTX - {_ANSWER})")
    parser.add_argument("--n-batch", type=at_least(1), default=512, metavar="N", help="tokens of a batch (512)")
    parser.add_argument("--n-ubatch", type=at_least(1), default=512, metavar="N", help="of a micro-batch (512)")
    add_cache_options(parser)
    add_full(parser)
    parser.add_argument("--json", action="store_true", help="bytes, for programs")
    add_dge_options(parser, DGEConfig())
    add_verbose(parser)
    parser.set_defaults(command_function=_estimate)


def _estimate(args: argparse.Namespace) -> int:
    config = wanted_dge(args, DGEConfig())
    n_prompt = args.n_prompt or max(args.n_ctx - _ANSWER, args.n_ctx // 2, 1)
    if n_prompt > args.n_ctx:
        raise CLIError(f"--n-prompt {n_prompt} does not fit into --n-ctx {args.n_ctx}")
    path = model_path(args.model, Progress(args.verbose))
    result = estimate(
        path,
        config,
        n_ctx=args.n_ctx,
        n_prompt=n_prompt,
        n_batch=args.n_batch,
        n_ubatch=args.n_ubatch,
        cache=cache_settings(args),
    )
    if args.json:
        totals = {"total_peak": result.total_peak, "total_after": result.total_after}
        print(json.dumps({**asdict(result), **totals}, indent=1))
        return 0
    for name, value in _table(result):
        print(f"{name:<28}{value}")
    return 0


def _table(e: Estimate) -> Iterator[tuple[str, str]]:
    most = "at most " if e.at_most else ""
    yield "prompt", f"{e.n_prompt:,} tokens"
    if e.reason is None:
        yield "rows", f"{e.rows:,} -> {most}{e.rows_after:,} per layer and KV head"
    else:
        yield "rows", f"{e.rows:,}, nothing is cut: {e.reason}"
    yield "weights", mebibytes(e.weights)
    yield f"KV cache for {e.n_ctx:,} cells", mebibytes(e.kv_full)
    yield "KV cache before the cut", mebibytes(e.kv_peak)
    yield "KV cache after the cut", most + mebibytes(e.kv_after)
    if e.other:
        yield "other caches", mebibytes(e.other)
    yield "compute before the cut", mebibytes(e.compute_peak)
    yield "compute after the cut", most + mebibytes(e.compute_after)
    yield "eviction buffers", mebibytes(e.dge)
    yield "parked", f"{mebibytes(e.parked)} ({e.parked_in})"
    yield "in memory before the cut", mebibytes(e.total_peak)
    yield "in memory after the cut", most + mebibytes(e.total_after)
