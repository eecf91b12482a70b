"""Runs one fixed programme on a model and writes down everything that comes out. Started in a process of its own.

    python identity_run.py stock|off|idle MODEL FLASH_ATTN TYPE_K TYPE_V OUT.npz

stock: plain llama_cpp, whatever library that finds. off: llama_dge with eviction off. idle: llama_dge with eviction on
and a budget that no prompt exceeds. The interpreter needs llama-cpp-python and NumPy; for all but stock also llama_dge.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

TYPES = {"f16": 1, "q8_0": 8}


def make(mode: str, **settings: Any) -> Any:
    if mode == "stock":
        import llama_cpp

        if hasattr(llama_cpp.llama_cpp._lib, "llama_dge_abi_version"):
            raise RuntimeError("this is not a stock library")
        return llama_cpp.Llama(**settings)
    import llama_dge

    if mode == "idle":
        settings["dge"] = {"budget": 1000, "scores": "both", "draft_tokens": 3}
    return llama_dge.Llama(**settings)


def state_bytes(llm: Any) -> Any:
    import llama_cpp

    size = llama_cpp.llama_state_get_size(llm.ctx)
    buffer = (ctypes.c_uint8 * size)()
    return np.frombuffer(bytes(buffer[: llama_cpp.llama_state_get_data(llm.ctx, buffer, size)]), dtype=np.uint8)


def main() -> None:
    mode, model, flash_attn, type_k, type_v, out = sys.argv[1:]
    settings: dict[str, Any] = {
        "model_path": model,
        "n_ctx": 1024,
        "n_batch": 128,
        "n_ubatch": 64,
        "n_threads": 1,
        "n_threads_batch": 1,
        "flash_attn": flash_attn == "1",
        "type_k": TYPES[type_k],
        "type_v": TYPES[type_v],
        "verbose": False,
        "seed": 5,
    }
    rng = np.random.default_rng(0)
    prompt: list[int] = rng.integers(3, 259, 300).tolist()
    found: dict[str, Any] = {}

    # greedy, with the logits of every token, then a second prompt that shares a prefix with the first
    llm = make(mode, logits_all=True, **settings)
    for name, tokens in (("first", prompt), ("second", prompt[:200] + prompt[:30])):
        result = llm.create_completion(tokens, max_tokens=40, temperature=0.0, logprobs=3)
        found[f"{name}_text"] = np.frombuffer(result["choices"][0]["text"].encode(), dtype=np.uint8)
        found[f"{name}_logprobs"] = np.array(result["choices"][0]["logprobs"]["token_logprobs"], dtype=np.float64)
        found[f"{name}_tokens"] = llm.input_ids[: llm.n_tokens].copy()
        found[f"{name}_logits"] = llm.scores[: llm.n_tokens].copy()
        found[f"{name}_state"] = state_bytes(llm)
    saved = llm.save_state()
    found["saved_state"] = np.frombuffer(bytes(saved.llama_state), dtype=np.uint8)

    # sampled, streamed, chat, a state that is loaded again
    llm = make(mode, **settings)
    found["sampled"] = np.array(
        [token for token, _ in zip(llm.generate(prompt, temp=0.8, top_k=50, repeat_penalty=1.1), range(40))]
    )
    found["sampled_state"] = state_bytes(llm)
    saved = llm.save_state()
    chunks = llm.create_completion("The quick brown fox " * 6, max_tokens=30, temperature=0.0, stream=True)
    found["streamed"] = np.frombuffer("".join(c["choices"][0]["text"] for c in chunks).encode(), dtype=np.uint8)
    llm.load_state(saved)
    found["loaded"] = np.array([token for token, _ in zip(llm.generate(prompt[:310], temp=0.0), range(20))])
    chat = llm.create_chat_completion([{"role": "user", "content": "What is it?"}], max_tokens=20, temperature=0.0)
    found["chat"] = np.frombuffer(chat["choices"][0]["message"]["content"].encode(), dtype=np.uint8)
    found["chat_state"] = state_bytes(llm)
    llm.reset()
    found["after_reset"] = np.array([token for token, _ in zip(llm.generate(prompt[50:], temp=0.0), range(20))])
    found["after_reset_state"] = state_bytes(llm)

    if mode != "idle":
        llm = make(mode, embedding=True, **settings)
        found["embedding"] = np.array(llm.embed("a few words"))
    np.savez(out, **found)


if __name__ == "__main__":
    main()
