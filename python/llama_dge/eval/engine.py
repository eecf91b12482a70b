"""Runs the arms of a prompt: they go on from the same full cache, for which the prompt is read once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import llama_cpp
import numpy as np

from .. import _native
from .._pieces import join
from ..config import DGEConfig
from ..llama import Llama
from ..stats import DGEStats
from .arms import FULL, Arm
from .cache import SEQ, Cache, EvalError, Logits, Saved
from .metrics import kl_divergence, log_softmax

#: Tokens at the end of a prompt that every arm reads itself, at least, so that its queries are captured.
TAIL = 8

Stop = Callable[[bytes], bool]


@dataclass
class ArmResult:
    """What one arm did with one prompt.

    `kl[t]` and `same[t]` compare the distribution that follows t tokens of the full cache's answer with the full
    cache's own; they are 0 up to `n_before_eviction`, those after it come from the kept entries.
    Seconds are wall-clock time, `cpu_seconds` that of the process for the whole arm. `prefill_seconds` is the time in
    which the prompt and the draft came to be in the cache, for all arms but the full cache as a copy. `decode_seconds`
    holds the `n_decoded` steps after the eviction, recalls included.
    """

    arm: Arm
    tokens: list[int]
    text: str
    ended: bool
    kl: list[float]
    same: list[bool]
    n_before_eviction: int
    evicted: bool
    stats: DGEStats | None
    rows_end: int
    n_kv_end: int
    n_decoded: int
    decode_seconds: float
    cpu_seconds: float
    prefill_seconds: float
    logits: list[Logits] = field(default_factory=list, repr=False)


@dataclass
class _Full:
    """The full cache's answer, and the distributions along its first tokens.

    `drafts[sums, n]`: the cache after the prompt and the first n tokens of the answer, with sums or without.
    """

    tokens: list[int]
    logits: list[Logits]
    drafts: dict[tuple[bool, int], Saved]


def not_longer(n_prompt: int, config: DGEConfig) -> bool:
    """Return whether a prompt is not longer than the budget, so that nothing is evicted."""
    return n_prompt <= config.budget if isinstance(config.budget, int) else config.budget >= 1.0


def _between(config: DGEConfig) -> int:
    """Return the tokens between two selections, at most."""
    return 8 if isinstance(config.recall, str) else config.recall


def _capturing(arms: Sequence[Arm], sums: bool) -> DGEConfig | None:
    """Return settings that capture what the arms that need sums need, or what the others need."""
    configs = [arm.config for arm in arms if arm.config is not None and arm.sums == sums]
    if not configs:
        return None
    window = max(config.window for config in configs)
    return DGEConfig(
        policy=configs[0].policy if sums else "snapkv",
        scores="both",
        window=window,
        budget=window + 1,
        draft_tokens=max(config.draft_tokens for config in configs),
        new_turn="reprefill",
        elastic=False,
    )


class Engine:
    """Answers prompts with many arms.

    Parameters
    ----------
    llm
        A model, loaded without eviction; while the engine is in use, nothing else may use it.
    n_tail
        Tokens at the end of a prompt that each arm reads itself.
    keep_logits
        Keep the logits along the full cache's answer in the results, for tests.
    """

    def __init__(self, llm: Llama, n_tail: int = TAIL, keep_logits: bool = False) -> None:
        self._llm = llm
        self._n_tail = n_tail
        self._keep_logits = keep_logits
        self._vocab = llama_cpp.llama_model_get_vocab(llm.model)
        self._cache = Cache(llm)

    def run(
        self,
        prompt: Sequence[int],
        arms: Sequence[Arm],
        *,
        max_tokens: int,
        kl_tokens: int = 64,
        shared: int = 0,
        stop: Stop | None = None,
    ) -> Iterator[ArmResult]:
        """Answer a prompt, greedily, with the full cache and then with each arm.

        Parameters
        ----------
        prompt
            Tokens, special ones included.
        arms
            The full cache is run in any case; its result is given where it is among them.
        max_tokens
            Length of an answer.
        kl_tokens
            Positions of the full cache's answer along which distributions are compared: they are held in memory,
            one vocabulary each.
        shared
            The first tokens, which the prompts before and after have in common: they are read once.
        stop
            Told the answer so far, says whether it is complete.

        Raises
        ------
        EvalError
            An eviction was not as the settings of its arm say.
        """
        prompt = list(prompt)
        n_tail = max([self._n_tail, *(arm.config.window for arm in arms if arm.config is not None)])
        n_head = max(0, len(prompt) - n_tail)
        shared = min(shared, n_head)

        # drafts come from the full cache, so that each is a beginning of its answer; the step that decodes a draft's
        # last token is the one that evicts
        drafts: dict[bool, set[int]] = {False: set(), True: set()}
        for arm in arms:
            if arm.config is not None:
                drafts[arm.sums].add(arm.config.draft_tokens - 1)

        start = time.perf_counter()
        self._cache.begin(_capturing(arms, sums=False))
        self._cache.read(prompt, n_head, shared, sums=False)
        prefill_seconds = time.perf_counter() - start
        result, full = self._run_full(drafts[False], max_tokens, kl_tokens, stop)
        result.prefill_seconds = prefill_seconds
        if any(arm.name == FULL for arm in arms):
            yield result
        if drafts[True]:
            # apart from the others: sums slow the full cache down, whose speed is a result
            self._cache.begin(_capturing(arms, sums=True))
            self._cache.read(prompt, n_head, shared, sums=True)
            self._keep_drafts(full, drafts[True])
        for arm in arms:
            if arm.config is not None:
                yield self._run_arm(arm, prompt, full, max_tokens, stop)
        self._cache.begin(None)

    # one arm

    def _run_full(
        self, drafts: set[int], max_tokens: int, kl_tokens: int, stop: Stop | None
    ) -> tuple[ArmResult, _Full]:
        """Answer with the full cache, and keep what it is after so many tokens, or at the end if that comes first."""
        tokens: list[int] = []
        compared: list[Logits] = []
        full = _Full(tokens, compared, {})
        cpu, seconds = time.process_time(), 0.0
        while True:
            if len(tokens) in drafts:
                full.drafts[False, len(tokens)] = self._cache.save()
            logits = self._cache.logits()
            if len(tokens) < kl_tokens:
                compared.append(logits)
            tokens.append(int(np.argmax(logits)))
            ended = self._ends(tokens, stop)
            if ended or len(tokens) >= max_tokens:
                break
            step = time.perf_counter()
            self._cache.decode(tokens[-1:])
            seconds += time.perf_counter() - step
        if max(drafts, default=0) > len(tokens) - 1:
            full.drafts[False, len(tokens) - 1] = self._cache.save()
        n_rows = self._cache.n_rows()
        result = ArmResult(
            arm=Arm(FULL, None),
            tokens=tokens,
            text=self._text(tokens),
            ended=ended,
            kl=[0.0] * len(compared),
            same=[True] * len(compared),
            n_before_eviction=len(tokens),
            evicted=False,
            stats=None,
            rows_end=n_rows,
            n_kv_end=min(-(-n_rows // 256) * 256, self._llm.n_ctx()),
            n_decoded=len(tokens) - 1,
            decode_seconds=seconds,
            cpu_seconds=time.process_time() - cpu,
            prefill_seconds=0.0,
            logits=compared if self._keep_logits else [],
        )
        return result, full

    def _keep_drafts(self, full: _Full, drafts: set[int]) -> None:
        """Decode the beginning of the answer, with sums, and keep what the cache is after so many tokens."""
        last = len(full.tokens) - 1
        drafts = {min(n, last) for n in drafts}
        for n in range(max(drafts) + 1):
            if n > 0:
                self._cache.decode(full.tokens[n - 1 : n])
            if n in drafts:
                full.drafts[True, n] = self._cache.save()

    def _draft(self, arm: Arm, prompt: list[int], full: _Full, n: int) -> bool:
        """Make the cache that of the prompt and n tokens of the answer, armed. Returns whether an eviction follows."""
        self._cache.begin(arm.config)
        self._cache.load(full.drafts[arm.sums, n])
        return self._cache.arm(len(prompt))

    def _run_arm(self, arm: Arm, prompt: list[int], full: _Full, max_tokens: int, stop: Stop | None) -> ArmResult:
        config = arm.config
        assert config is not None
        n_prompt, k = len(prompt), config.draft_tokens
        cpu, start = time.process_time(), time.perf_counter()
        n_shared = min(k, len(full.tokens))
        will_evict = self._draft(arm, prompt, full, n_shared - 1)
        prefill_seconds = time.perf_counter() - start

        # along the full cache's answer
        n_forced = len(full.logits)
        kl = [0.0] * min(n_shared, n_forced)
        same = [True] * len(kl)
        chosen = full.tokens[: len(kl)]
        kept = full.logits[: len(kl)] if self._keep_logits else []
        seconds, n_decoded = 0.0, 0
        evicted: DGEStats | None = None
        evicted_at = 0
        for t in range(n_shared, n_forced):
            step = time.perf_counter()
            self._cache.decode([full.tokens[t - 1]])
            if t > k:
                seconds += time.perf_counter() - step
                n_decoded += 1
            if evicted is None and will_evict:
                evicted, evicted_at = self._check_eviction(arm, n_prompt), t
            logits = self._cache.logits()
            if self._keep_logits:
                kept.append(logits)
            chosen.append(int(np.argmax(logits)))
            same.append(chosen[-1] == full.tokens[t])
            kl.append(kl_divergence(log_softmax(full.logits[t]), log_softmax(logits)))

        # the arm's own answer: the same up to the first token that differs
        split = same.index(False) if False in same else n_forced - 1
        tokens = [*full.tokens[:split], chosen[split]] if split >= n_shared else full.tokens[:n_shared]
        ended = self._ends(tokens, stop)
        if not ended and len(tokens) < max_tokens:
            if n_shared <= split < n_forced - 1:
                self._rewind(arm, prompt, full, split)
            while not ended and len(tokens) < max_tokens:
                step = time.perf_counter()
                self._cache.decode(tokens[-1:])
                if len(tokens) > k:
                    seconds += time.perf_counter() - step
                    n_decoded += 1
                if evicted is None and will_evict and len(tokens) >= k:
                    evicted, evicted_at = self._check_eviction(arm, n_prompt), len(tokens)
                tokens.append(int(np.argmax(self._cache.logits())))
                ended = self._ends(tokens, stop)
        stats = _native.seq_stats(self._cache.ctx, SEQ)
        if evicted is not None:
            self._check_end(arm, evicted, stats)
        return ArmResult(
            arm=arm,
            tokens=tokens,
            text=self._text(tokens),
            ended=ended,
            kl=kl,
            same=same,
            n_before_eviction=evicted_at if evicted is not None else max(len(tokens), n_forced),
            evicted=evicted is not None,
            stats=stats,
            rows_end=stats.rows,
            n_kv_end=stats.n_kv,
            n_decoded=n_decoded,
            decode_seconds=seconds,
            cpu_seconds=time.process_time() - cpu,
            prefill_seconds=prefill_seconds,
            logits=kept,
        )

    def _rewind(self, arm: Arm, prompt: list[int], full: _Full, n: int) -> None:
        """Make the cache what it is after n tokens of an answer, of which it has seen more."""
        config = arm.config
        assert config is not None
        # without recall, entries after the prompt can be removed
        if not config.recall and self._cache.truncate(len(prompt) + n):
            return
        k = config.draft_tokens
        self._draft(arm, prompt, full, k - 1)
        for token in full.tokens[k - 1 : n]:
            self._cache.decode([token])

    # is it what it says?

    def _check_eviction(self, arm: Arm, n_prompt: int) -> DGEStats | None:
        """Return what the eviction did, None where it only follows when the answer has outgrown the budget."""
        stats = _native.seq_stats(self._cache.ctx, SEQ)
        config = arm.config
        assert config is not None
        below = not_longer(n_prompt, config)
        if stats.state == "armed" and config.recall and below:
            most = config.budget if isinstance(config.budget, int) else n_prompt
            if stats.rows > most + config.draft_tokens + _between(config):
                raise EvalError(f"{arm.name}: the answer has outgrown the budget, and nothing was evicted")
            return None
        if stats.state != "evicted":
            why = stats.error or f'its state is "{stats.state}"'
            raise EvalError(f"{arm.name}: nothing of the prompt of {n_prompt} tokens was evicted: {why}")
        heads = [
            _native.n_kept(self._cache.ctx, SEQ, layer, head)
            for layer in _native.layers(self._cache.ctx)
            for head in range(_native.n_head_kv(self._cache.ctx, layer))
        ]
        budget = config.budget if isinstance(config.budget, int) else stats.budget
        exact = config.layer_budgets == "exact" or config.policy != "pyramidkv"
        least, most = (0, n_prompt + stats.n_draft) if not exact else (budget, budget + stats.n_draft)
        even = config.policy != "pyramidkv" and config.head_budgets == "uniform"
        counts = heads if even else [round(float(np.mean(heads)))]
        if not all(least <= n <= most for n in counts):
            raise EvalError(
                f"{arm.name}: {min(heads)} .. {max(heads)} entries are kept, which is not the budget {budget}"
            )
        return stats

    def _check_end(self, arm: Arm, evicted: DGEStats, end: DGEStats) -> None:
        config = arm.config
        assert config is not None
        if not config.recall:
            return
        if end.rows > evicted.budget + evicted.n_draft + _between(config):
            raise EvalError(f"{arm.name}: {end.rows} entries are attended at the end, too many for the budget")

    # texts

    def _ends(self, tokens: list[int], stop: Stop | None) -> bool:
        if llama_cpp.llama_vocab_is_eog(self._vocab, tokens[-1]):
            return True
        return stop is not None and stop(self._raw(tokens))

    def _raw(self, tokens: list[int]) -> bytes:
        ends = tokens and llama_cpp.llama_vocab_is_eog(self._vocab, tokens[-1])
        return join(self._vocab, tokens[:-1] if ends else tokens)

    def _text(self, tokens: list[int]) -> str:
        return self._raw(tokens).decode("utf-8", "replace")

    def answer_text(self, tokens: list[int]) -> str:
        """Return the text of the first tokens of an answer."""
        return self._text(tokens)

    def close(self) -> None:
        """Empty the cache and switch eviction off, so that the model can be used again."""
        self._cache.close()
