"""Builds a model from its settings, which are llama-cpp-python's."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from llama_cpp import llama_chat_format, llama_speculative, llama_tokenizer
from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from .settings import ModelSettings

#: Settings that are arguments of `Llama` by the same name.
_SAME = (
    *("n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "vocab_only", "use_mmap", "use_mlock", "rpc_servers"),
    *("seed", "n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "rope_scaling_type", "rope_freq_base"),
    *("rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"),
    *("mul_mat_q", "logits_all", "embedding", "offload_kqv", "flash_attn", "last_n_tokens_size", "lora_base"),
    *("lora_path", "numa", "chat_format", "type_k", "type_v", "verbose"),
)
#: Chat formats that see images by the file of `clip_model_path`.
_EYES = {
    "llava-1-5": "Llava15ChatHandler",
    "obsidian": "ObsidianChatHandler",
    "llava-1-6": "Llava16ChatHandler",
    "moondream": "MoondreamChatHandler",
    "nanollava": "NanoLlavaChatHandler",
    "llama-3-vision-alpha": "Llama3VisionAlphaChatHandler",
    "minicpm-v-2.6": "MiniCPMv26ChatHandler",
    "qwen2.5-vl": "Qwen25VLChatHandler",
    "mtmd": "MTMDChatHandler",
    "gemma4": "Gemma4ChatHandler",
}
_OVERRIDES: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text.lower() in ("true", "1"),
    "int": int,
    "float": float,
    "str": str,
}


def load(settings: ModelSettings, create: Any, **arguments: Any) -> Any:
    """Build a model.

    Parameters
    ----------
    settings
        Of the model.
    create
        A class `Llama`.
    **arguments
        Of the class, instead of what the settings say.

    Raises
    ------
    ValueError
        A setting does not fit, or the model cannot be loaded.
    """
    given = {name: getattr(settings, name) for name in _SAME}
    given.update(
        chat_handler=_chat_handler(settings),
        tokenizer=_tokenizer(settings),
        draft_model=_draft_model(settings),
        kv_overrides=_overrides(settings.kv_overrides),
    )
    given.update(arguments)
    if settings.hf_model_repo_id is not None:
        create = functools.partial(create.from_pretrained, repo_id=settings.hf_model_repo_id, filename=settings.model)
    else:
        given["model_path"] = settings.model
    llm = create(**given)
    if settings.cache:
        kind = LlamaDiskCache if settings.cache_type == "disk" else LlamaRAMCache
        llm.set_cache(kind(capacity_bytes=settings.cache_size))
    return llm


def _chat_handler(settings: ModelSettings) -> Any:
    name = settings.chat_format
    if name == "hf-autotokenizer":
        path = _needed(settings, "hf_pretrained_model_name_or_path")
        return llama_chat_format.hf_autotokenizer_to_chat_completion_handler(path)
    if name == "hf-tokenizer-config":
        with open(_needed(settings, "hf_tokenizer_config_path"), encoding="utf-8") as file:
            return llama_chat_format.hf_tokenizer_config_to_chat_completion_handler(json.load(file))
    if name not in _EYES:
        return None
    kind = getattr(llama_chat_format, _EYES[name])
    path = _needed(settings, "clip_model_path")
    if settings.hf_model_repo_id is not None:
        return kind.from_pretrained(repo_id=settings.hf_model_repo_id, filename=path, verbose=settings.verbose)
    return kind(clip_model_path=path, verbose=settings.verbose)


def _needed(settings: ModelSettings, name: str) -> str:
    value = getattr(settings, name)
    if value is None:
        raise ValueError(f"chat_format={settings.chat_format!r}: needs {name}")
    return str(value)


def _tokenizer(settings: ModelSettings) -> Any:
    path = settings.hf_pretrained_model_name_or_path
    return None if path is None else llama_tokenizer.LlamaHFTokenizer.from_pretrained(path)


def _draft_model(settings: ModelSettings) -> Any:
    if settings.draft_model is None:
        return None
    return llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=settings.draft_model_num_pred_tokens)


def _overrides(given: list[str] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    overrides = {}
    for text in given:
        key, equals, typed = text.partition("=")
        kind, colon, value = typed.partition(":")
        if not equals or not colon or kind not in _OVERRIDES:
            raise ValueError(f"kv_overrides={text!r}: must be key=type:value with a type of {', '.join(_OVERRIDES)}")
        overrides[key] = _OVERRIDES[kind](value)
    return overrides
