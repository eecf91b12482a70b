"""How the tokens of an answer are chosen, the same for one conversation and for many."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
from llama_cpp._internals import LlamaSampler

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


class Sampler:
    """A chain of llama.cpp's samplers for one answer, in the order of llama-cpp-python's.

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
        chain: Any = LlamaSampler()  # type: ignore[no-untyped-call]
        self._chain = chain
        n_vocab = llm.n_vocab()
        self._n_left = sampling.min_tokens
        if sampling.min_tokens > 0:
            chain.add_custom(self._forbid_end)
            vocab = llm._model.vocab
            self._ends = [i for i in range(n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, i)]
        if sampling.logit_bias:
            chain.add_logit_bias(n_vocab, dict(sampling.logit_bias))
        chain.add_penalties(
            n_vocab=n_vocab,
            penalty_last_n=llm.last_n_tokens_size,
            penalty_repeat=sampling.repeat_penalty,
            penalty_freq=sampling.frequency_penalty,
            penalty_present=sampling.presence_penalty,
        )
        if sampling.grammar is not None:
            llama_cpp.llama_sampler_chain_add(chain.sampler, _grammar_sampler(llm, sampling.grammar))
        if sampling.temperature == 0.0:
            chain.add_greedy()
        elif sampling.mirostat_mode == 1:
            chain.add_mirostat(n_vocab, seed, sampling.mirostat_tau, sampling.mirostat_eta, 100)
        elif sampling.mirostat_mode == 2:
            chain.add_mirostat_v2(seed, sampling.mirostat_tau, sampling.mirostat_eta)
        else:
            chain.add_top_k(sampling.top_k)
            chain.add_top_p(sampling.top_p, 1)
            chain.add_min_p(sampling.min_p, 1)
            chain.add_temp(sampling.temperature)
            chain.add_dist(seed)

    def sample(self, ctx: Any, idx: int = -1) -> int:
        """Choose the token that follows output `idx` of the last batch."""
        token = int(llama_cpp.llama_sampler_sample(self._chain.sampler, getattr(ctx, "ctx", ctx), idx))
        self._n_left -= 1
        return token

    def close(self) -> None:
        """Free it."""
        self._chain.close()

    def _forbid_end(self, candidates: Any) -> None:
        if self._n_left > 0:
            data = candidates.contents.data
            for token in self._ends:  # the first sampler sees the tokens in order
                data[token].logit = -float("inf")


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
