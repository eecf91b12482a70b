"""What one request may ask for: each number that makes the server spend memory or time has a bound.

docs/server.md has the same table, and a test compares the two.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..config import PRESETS, DGEConfig

#: Bytes of a request's body.
BODY_BYTES = 64 * 2**20
#: Answers of one request: prompts x `n`, or x `best_of`.
ANSWERS = 16
#: Strings of `stop`, and characters of each.
STOPS = 64
STOP_LENGTH = 1024
#: Tokens of `logit_bias`.
BIASES = 1024
#: Alternatives of each token, with `logprobs`.
TOP_LOGPROBS = 20
#: Functions in `tools`, as in OpenAI's API.
TOOLS = 128
#: Characters of `grammar`, or of the one made of a schema; parentheses in each other; repetitions.
GRAMMAR_LENGTH = 32 * 1024
GRAMMAR_DEPTH = 64
#: Values in each other, and values, of a JSON schema.
SCHEMA_DEPTH = 32
SCHEMA_NODES = 4096
#: Items or characters that `minItems`, `maxItems`, `minLength`, `maxLength` may name.
SCHEMA_REPEATS = 1000
#: Texts of one request for embeddings.
EMBEDDINGS = 2048
#: Draft tokens and window of `dge` together, or as many as the server's own: queries are held for them.
DGE_QUERIES = 1024
#: Entries that pooling spans, or as many as the server's own.
DGE_KERNEL_SIZE = 129

#: Not for a client to choose: they touch the server's memory and disk, or are decided when the model is loaded.
SERVER_ONLY = ("elastic", "park", "park_dir", "park_limit", "strict")


class BadOverride(ValueError):
    """The `dge` of a request does not fit."""


def request_config(base: DGEConfig | None, override: object) -> DGEConfig | None:
    """Return the settings of eviction that a request gets.

    Parameters
    ----------
    base
        Those of the server.
    override
        The `dge` of the request: None leaves them, False turns eviction off, True on; the name of a preset or a dict
        changes some fields.

    Raises
    ------
    BadOverride
        With the message of `DGEConfig`, or the bound that is exceeded.
    """
    if override is None:
        return base
    if override is False:
        return None
    start = DGEConfig() if base is None else base
    if override is True:
        return start
    if isinstance(override, str) and override in PRESETS:
        override = dict(PRESETS[override])
    if not isinstance(override, dict):
        names = ", ".join(PRESETS)
        raise BadOverride(f"dge={override!r}: must be true, false, a preset ({names}) or an object of settings")
    refused = [name for name in SERVER_ONLY if name in override]
    if refused:
        raise BadOverride(f"dge: {', '.join(refused)}: only the server's own settings have that")
    config = _changed(start, override)
    n, most = config.draft_tokens + config.window, max(DGE_QUERIES, start.draft_tokens + start.window)
    if n > most:
        raise BadOverride(f"dge: draft_tokens and window are {n} together, and a request may have {most} of them")
    most = max(DGE_KERNEL_SIZE, start.kernel_size)
    if config.kernel_size > most:
        raise BadOverride(f"dge: kernel_size is {config.kernel_size}, and a request may have {most} at most")
    return config


def _changed(start: DGEConfig, override: dict[str, Any]) -> DGEConfig:
    try:
        fields = [field.name for field in dataclasses.fields(DGEConfig)]
        DGEConfig.from_any({name: value for name, value in override.items() if name not in fields})  # raises if any
        return dataclasses.replace(start, **override)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadOverride(str(error)) from error
