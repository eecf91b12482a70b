"""How the tokens of an answer are chosen, the same for one conversation and for many."""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._internals import LlamaSampler, LlamaTokenDataArray

from . import bounds
from .errors import bad_request


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice of tokens, named as in llama-cpp-python's server."""

    temperature: float = 0.8
    top_p: float = 0.95
    min_p: float = 0.05
    top_k: int = 40
    repeat_penalty: float = 1.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    min_tokens: int = 0
    grammar: str | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def seed_of(self, index: int, default: int) -> int:
        """Return the seed of one of several answers: each has another."""
        if self.seed is not None:
            return (self.seed + index) & 0xFFFFFFFF
        if default == llama_cpp.LLAMA_DEFAULT_SEED:
            return random.randrange(2**32)
        return random.Random(default + index).randrange(2**32)


class DeadEnd(Exception):
    """No token may follow: a grammar allows none, or only the end where `min_tokens` forbids it."""


class Sampler:
    """llama.cpp's samplers for one answer, in the order of llama-cpp-python's.

    Parameters
    ----------
    llm
        The model: a `Llama`.
    sampling
        The settings.
    seed
        Of this answer.
    """

    def __init__(self, llm: Any, sampling: Sampling, seed: int) -> None:
        self._n_vocab = n_vocab = int(llm.n_vocab())
        self._n_left = sampling.min_tokens
        self._ends: list[int] = []
        if sampling.min_tokens > 0:
            vocab = llm._model.vocab
            self._ends = [i for i in range(n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, i)]
        first: Any = LlamaSampler()  # type: ignore[no-untyped-call]
        self._chains = [first]
        self._data: Any = None
        if sampling.logit_bias:
            first.add_logit_bias(n_vocab, dict(sampling.logit_bias))
        first.add_penalties(
            n_vocab=n_vocab,
            penalty_last_n=llm.last_n_tokens_size,
            penalty_repeat=sampling.repeat_penalty,
            penalty_freq=sampling.frequency_penalty,
            penalty_present=sampling.presence_penalty,
        )
        if sampling.grammar is not None:
            llama_cpp.llama_sampler_chain_add(first.sampler, _grammar_sampler(llm, sampling.grammar))
        last = first
        if sampling.grammar is not None or self._ends:
            last = LlamaSampler()  # type: ignore[no-untyped-call]
            self._chains.append(last)
            self._data = LlamaTokenDataArray(n_vocab=n_vocab)
        if sampling.temperature == 0.0:
            last.add_greedy()
        elif sampling.mirostat_mode == 1:
            last.add_mirostat(n_vocab, seed, sampling.mirostat_tau, sampling.mirostat_eta, 100)
        elif sampling.mirostat_mode == 2:
            last.add_mirostat_v2(seed, sampling.mirostat_tau, sampling.mirostat_eta)
        else:
            last.add_top_k(sampling.top_k)
            last.add_top_p(sampling.top_p, 1)
            last.add_min_p(sampling.min_p, 1)
            last.add_temp(sampling.temperature)
            last.add_dist(seed)

    def sample(self, ctx: Any, idx: int = -1) -> int:
        """Choose the token that follows output `idx` of the last batch; raises DeadEnd."""
        ctx = getattr(ctx, "ctx", ctx)
        if self._data is not None:
            return self._checked(ctx, idx)
        return int(llama_cpp.llama_sampler_sample(self._chains[0].sampler, ctx, idx))

    def _checked(self, ctx: Any, idx: int) -> int:
        """Choose a token that is not excluded: a grammar ends the process that makes it accept another."""
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, idx), (self._n_vocab,))
        self._data.copy_logits(logits)
        data, candidates = self._data.candidates_data, self._data.candidates
        candidates.selected = -1
        if self._n_left > 0:
            data.logit[self._ends] = -np.inf
        llama_cpp.llama_sampler_apply(self._chains[0].sampler, ctypes.byref(candidates))
        if not np.isfinite(data.logit[: candidates.size]).any():
            raise DeadEnd
        llama_cpp.llama_sampler_apply(self._chains[1].sampler, ctypes.byref(candidates))
        at = int(candidates.selected)
        if not np.isfinite(data.logit[at]):
            at = int(np.argmax(data.logit[: candidates.size]))
        token = int(data.id[at])
        for chain in self._chains:
            llama_cpp.llama_sampler_accept(chain.sampler, token)
        self._n_left -= 1
        return token

    def close(self) -> None:
        """Free it."""
        for chain in self._chains:
            chain.close()


def _grammar_sampler(llm: Any, grammar: str) -> Any:
    sampler = llama_cpp.llama_sampler_init_grammar(llm._model.vocab, grammar.encode(), b"root")
    if not sampler:
        raise bad_request("grammar: cannot be parsed as GBNF with a rule named root", "grammar")
    return sampler


def check_grammar(llm: Any, grammar: str) -> None:
    """Raise APIError where a grammar is too large, or cannot be parsed."""
    if len(grammar) > bounds.GRAMMAR_LENGTH:
        raise bad_request(f"grammar: has {len(grammar)} characters, and may have {bounds.GRAMMAR_LENGTH}", "grammar")
    depth = most = 0
    for char in re.sub(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#.*', "", grammar):
        depth += (char == "(") - (char == ")")
        most = max(most, depth)
    if most > bounds.GRAMMAR_DEPTH:
        raise bad_request(
            f"grammar: parentheses are nested {most} deep, and may be {bounds.GRAMMAR_DEPTH}: the parser recurses",
            "grammar",
        )
    llama_cpp.llama_sampler_free(_grammar_sampler(llm, grammar))


def token_biases(llm: Any, given: Mapping[str, float], kind: str) -> dict[int, float]:
    """Return the biases of tokens by id; raises APIError for one that the model does not have.

    Parameters
    ----------
    llm
        The model.
    given
        As the request has them.
    kind
        "input_ids", or "tokens": keys are texts, and each of their tokens gets the bias.
    """
    biases: dict[int, float] = {}
    n_vocab = llm.n_vocab()
    for key, bias in given.items():
        if kind == "tokens":
            tokens = llm.tokenize(key.encode(), add_bos=False, special=True)
        else:
            try:
                tokens = [int(key)]
            except ValueError as error:
                raise bad_request(f"logit_bias: {key!r} is no token id", "logit_bias") from error
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise bad_request(f"logit_bias: {token} is no token id: they are 0 .. {n_vocab - 1}", "logit_bias")
            biases[token] = bias
    return biases
