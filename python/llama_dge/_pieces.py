"""Bytes of tokens, however long: `detokenize` of llama-cpp-python leaves out tokens of more than 32 bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import llama_cpp

_SIZE = 64  # more than most tokens have


def piece(vocab: Any, token: int, special: bool = False) -> bytes:
    """Return the bytes of a token of a ``llama_vocab``; those that stand for no text have some with `special` only."""
    size = _SIZE
    while True:
        buffer = ctypes.create_string_buffer(size)
        n: int = llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        if n >= 0:
            return buffer.raw[:n]
        size = -n


def join(vocab: Any, tokens: Iterable[int]) -> bytes:
    """Return the bytes of tokens one after the other."""
    return b"".join(piece(vocab, token) for token in tokens)
