"""What a model has to pass. The reference is the library's own full cache, rows removed from it by stock code.

The NumPy forward pass of tests/reference knows the llama architecture only. Here two contexts of the same library are
compared, so a fault that both share is not seen; what the eviction itself does is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference import driver
from reference.driver import Context, Logits, NativeModel

# More rows than the sliding windows of the models. The number of evicted rows is a multiple of 64, which keeps the rows
# of other sequences in the same lanes of SIMD sums: they can be compared bit for bit even where freed cells are used.
N_PROMPT, BUDGET, N_DRAFT, SINKS = 104, 40, 1, 4
EVICTED = (SINKS, N_PROMPT - (BUDGET - SINKS))
N_STEPS = 17
STREAMING: dict[str, Any] = {"policy": "streamingllm", "sinks": SINKS, "budget": BUDGET, "draft_tokens": N_DRAFT + 1}

# An error has to be small, and small beside what one row does that is kept and should not be. Below the floor it is
# noise of sums in another order, and a model in which one row does no more than that proves nothing.
NMSE_BOUND = 1e-5
NMSE_FLOOR = 1e-10
ROW_RATIO = 0.1


class CheckError(Exception):
    """What a model did wrong."""


class Insensitive(Exception):
    """The model attends so little to single rows that the check proves nothing."""


@dataclass(frozen=True)
class Case:
    """A model, the tokens that all checks use, and whether flash attention is on."""

    model: NativeModel
    flash_attn: bool = False

    def tokens(self, seed: int = 0) -> list[int]:
        """Prompt, draft and forced answer."""
        rng = np.random.default_rng([N_PROMPT, seed])
        found: list[int] = rng.integers(3, self.model.n_vocab, N_PROMPT + N_DRAFT + N_STEPS).tolist()
        return found

    @contextmanager
    def context(self, dge: dict[str, Any] | None = None, **settings: Any) -> Iterator[Context]:
        """A context of 512 cells per stream; micro-batches that are smaller than the prompt."""
        # some models choose their RoPE factors by the cells that a sequence can have: the same in all contexts
        n_ctx = 512 * (1 if settings.get("kv_unified", True) else settings["n_seq_max"])
        made = Context(self.model, n_ctx=n_ctx, n_batch=256, n_ubatch=64, flash_attn=self.flash_attn, **settings)
        try:
            if dge is not None:
                made.enable(**dge)
            yield made
        finally:
            made.close()


def require(condition: bool, what: str) -> None:
    """Raise CheckError, which python -O does not remove as it does assert."""
    if not condition:
        raise CheckError(what)


def nmse(found: Logits, want: Logits) -> float:
    """Largest normalised mean squared error of a row of logits."""
    a, b = found.astype(np.float64), want.astype(np.float64)
    return float(np.max(((a - b) ** 2).sum(axis=1) / np.maximum((b**2).sum(axis=1), 1e-30)))


def steps(context: Context, tokens: list[int], seq: int = 0) -> Logits:
    """Evaluate tokens one by one."""
    return np.concatenate([context.decode([token], seq=seq) for token in tokens])


def debug_seq_rm(context: Context, seq: int, p0: int, p1: int) -> bool:
    """Remove rows from the part of the memory that can be evicted, with llama.cpp's own code."""
    return context.debug_seq_rm(seq, p0, p1)


def evicted_run(context: Context, tokens: list[int]) -> Logits:
    """Prefill, draft, eviction and forced decoding; returns the logits after the eviction.

    Raises CheckError unless the eviction was made as asked.
    """
    context.decode(tokens[:N_PROMPT], every=False)
    status = context.arm(N_PROMPT)
    require(status == driver.OK, f"arm: {context.status(status)}")
    steps(context, tokens[N_PROMPT : N_PROMPT + N_DRAFT])
    require(context.info()["state"] == driver.STATE_ARMED, "evicted before the draft was complete")
    logits = steps(context, tokens[N_PROMPT + N_DRAFT :])
    info = context.info()
    require(info["state"] == driver.STATE_EVICTED, f"no eviction: {context.status(info['error'])}")
    rows = (info["n_rows_before"], info["n_rows_after"], info["n_rows"])
    want = (N_PROMPT + N_DRAFT, BUDGET + N_DRAFT, BUDGET + N_DRAFT + N_STEPS)
    require(rows == want, f"rows before the eviction, after it and at the end: {rows}, not {want}")
    require(bool(np.isfinite(logits).all()), "logits are not finite")
    return logits


def full_run(context: Context, tokens: list[int], evicted: tuple[int, int] | None) -> Logits:
    """The same on the full cache, from which rows may be removed after the draft.

    Needs a second sequence, which takes the freed cells: the answer's rows come after the older ones in the cache, as
    they do after an eviction. Flash attention adds up rows in f16, and in another order the sum is another.
    """
    context.decode(tokens[:N_PROMPT], every=False)
    steps(context, tokens[N_PROMPT : N_PROMPT + N_DRAFT])
    if evicted:
        n = evicted[1] - evicted[0]
        require(debug_seq_rm(context, 0, *evicted), "llama_dge_debug_seq_rm refused")
        n_rows = context.info()["n_rows"]
        require(n_rows == N_PROMPT + N_DRAFT - n, f"the reference lost {N_PROMPT + N_DRAFT - n_rows} rows, not {n}")
        context.decode(tokens[:n], seq=1, every=False)
    return steps(context, tokens[N_PROMPT + N_DRAFT :])


def check_identity(case: Case) -> dict[str, Any]:
    """With nothing to evict, logits are those of a context without eviction, bit for bit."""
    tokens = case.tokens()
    idle = {"scores": "both", "budget": N_PROMPT, "draft_tokens": N_DRAFT + 1}
    found = []
    for dge in (None, idle):
        with case.context(dge) as context:
            prefill = context.decode(tokens[:N_PROMPT])
            if dge:
                status = context.arm(N_PROMPT)
                require(status == driver.NOTHING_TO_EVICT, f"arm: {context.status(status)}")
            found.append(np.concatenate([prefill, steps(context, tokens[N_PROMPT:])]))
    require(bool(np.isfinite(found[0]).all()) and float(np.ptp(found[0])) > 0, "the model's logits say nothing")
    if not np.array_equal(found[0], found[1]):
        raise CheckError(f"not the logits of a context without eviction, NMSE {nmse(found[1], found[0]):.1e}")
    return {}


def check_mask(case: Case) -> dict[str, Any]:
    """After an eviction, logits are those of the full cache without the evicted rows."""
    tokens = case.tokens()
    with case.context(STREAMING) as context:
        got = evicted_run(context, tokens)
        kept = context.kept()
    want_kept = [*range(SINKS), *range(EVICTED[1], N_PROMPT + N_DRAFT)]
    require(all(positions.tolist() == want_kept for heads in kept for positions in heads), "kept other rows")
    # the full cache; the evicted rows gone; one of them still there
    references = []
    for evicted in (None, EVICTED, (EVICTED[0], EVICTED[1] - 1)):
        with case.context(STREAMING, n_seq_max=2) as context:
            references.append(full_run(context, tokens, evicted))
    full, want, one_more = references
    error, effect, one_row = nmse(got, want), nmse(want, full), nmse(one_more, want)
    numbers = f"NMSE {error:.1e} to the reference; one row moves it by {one_row:.1e}, the eviction by {effect:.1e}"
    require(error <= min(NMSE_BOUND, max(NMSE_FLOOR, ROW_RATIO * one_row)), numbers)
    require(not np.array_equal(got, full), "logits are those of the full cache")
    if ROW_RATIO * one_row < NMSE_FLOOR:
        raise Insensitive(numbers)
    return {"nmse": error, "one_row": one_row, "effect": effect}


def check_scores(case: Case) -> dict[str, Any]:
    """SnapKV keeps as many rows as asked, valid ones, the same in every run."""
    tokens = case.tokens()
    for scores in ("draft", "both"):
        dge = {"policy": "snapkv", "scores": scores, "budget": BUDGET, "draft_tokens": N_DRAFT + 1}
        runs = []
        for _ in range(2):
            with case.context(dge) as context:
                runs.append((evicted_run(context, tokens), context.kept()))
        (logits, kept), (logits_again, kept_again) = runs
        require(np.array_equal(logits, logits_again), f"{scores}: two runs differ")
        for heads, heads_again in zip(kept, kept_again):
            for positions, again in zip(heads, heads_again):
                n, last = len(positions), N_PROMPT + N_DRAFT
                require(np.array_equal(positions, again), f"{scores}: two runs keep different rows")
                require(n == BUDGET + N_DRAFT, f"{scores}: {n} rows kept, not {BUDGET + N_DRAFT}")
                require(bool((np.diff(positions) > 0).all()), f"{scores}: positions do not ascend")
                require(positions[0] >= 0 and positions[-1] == last - 1, f"{scores}: positions are not in the prompt")
                # the window of 8 rows and the draft
                tail = np.arange(last - 8 - N_DRAFT, last)
                require(np.array_equal(positions[-len(tail) :], tail), f"{scores}: window or draft are not kept")
    return {}


def sequences_run(context: Context, tokens: tuple[list[int], list[int]], evict: bool) -> tuple[Logits, Logits]:
    """Two sequences of one context, the first evicted on request; logits of both after the draft."""
    context.decode(tokens[1][:N_PROMPT], seq=1, every=False)
    context.decode(tokens[0][:N_PROMPT], seq=0, every=False)
    if evict:
        status = context.arm(N_PROMPT, 0)
        require(status == driver.OK, f"arm: {context.status(status)}")
    found = []
    for i in range(N_DRAFT + N_STEPS):
        rows = [(tokens[seq][N_PROMPT + i], N_PROMPT + i, seq, True) for seq in (0, 1)]
        # in one batch, which the eviction interrupts, and in two
        together = i % 2 == 1
        both = context.decode_batch(rows) if together else [context.decode_batch([row])[0] for row in rows]
        found.append(np.stack([both[0], both[1]]))
    if evict:
        states = [context.info(seq)["state"] for seq in (0, 1)]
        require(states == [driver.STATE_EVICTED, driver.STATE_FULL], f"states of the two sequences: {states}")
        require(context.info(0)["n_rows_after"] == BUDGET + N_DRAFT, "another number of rows was kept")
        require(context.info(1)["n_rows"] == N_PROMPT + N_DRAFT + N_STEPS, "the other sequence lost rows")
    logits = np.stack(found)[N_DRAFT:]
    return logits[:, 0], logits[:, 1]


def check_sequences(case: Case) -> dict[str, Any]:
    """An eviction leaves the other sequence bit-identical, and is the same as in a context of one sequence."""
    tokens = (case.tokens(), case.tokens(1))
    with case.context(STREAMING) as context:
        alone, kept_alone = evicted_run(context, tokens[0]), context.kept()
    for unified in (True, False):
        name = "one stream" if unified else "two streams"
        runs = []
        for evict in (False, True):
            with case.context(STREAMING, n_seq_max=2, kv_unified=unified) as context:
                runs.append(sequences_run(context, tokens, evict))
                kept = context.kept() if evict else []
        (first_full, other_full), (first, other) = runs
        if not np.array_equal(other, other_full):
            raise CheckError(f"{name}: the other sequence changed, NMSE {nmse(other, other_full):.1e}")
        require(not np.array_equal(first, first_full), f"{name}: the eviction changed nothing")
        pairs = [(a, b) for heads, heads_alone in zip(kept, kept_alone) for a, b in zip(heads, heads_alone)]
        require(
            all(np.array_equal(a, b) for a, b in pairs), f"{name}: other rows kept than in a context of one sequence"
        )
        # of the first step: deep random models amplify the noise of another shape of batch from step to step
        error = nmse(first[:1], alone[:1])
        require(error <= NMSE_BOUND, f"{name}: NMSE {error:.1e} to a context of one sequence")
    return {}


Check = Callable[[Case], dict[str, Any]]
CHECKS: dict[str, Check] = {
    "identity": check_identity,
    "mask": check_mask,
    "scores": check_scores,
    "sequences": check_sequences,
}
