"""References that are wrong in one point, which a comparison with the library has to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .forward import Reference
from .rounding import rotate, rotation_size_k
from .softmax import Softmax
from .spec import Array, TinyModel

WRONG_FACTOR = 1.25


def _with(model: TinyModel, **changed: Any) -> TinyModel:
    return replace(model, spec=replace(model.spec, **changed))


def _as_if(model: TinyModel, **changed: Any) -> TinyModel:
    return _with(model, kind=replace(model.spec.kind, **changed))


def _weights(model: TinyModel, name: str, change: Callable[[dict[str, Array]], Array]) -> TinyModel:
    return replace(model, layers=[{**w, name: change(w)} for w in model.layers])


def wrong_models(model: TinyModel) -> dict[str, TinyModel]:
    """Models with another scale, cap, sink, norm, window or rotation of positions; each differs in one point only."""
    spec, kind = model.spec, model.spec.kind
    wrong = {"scale a quarter too large": _with(model, scale=spec.query_scale * WRONG_FACTOR)}
    if spec.scale is not None:
        wrong["scale of the head's size"] = _with(model, scale=None)
    if spec.cap:
        wrong["no cap"] = _with(model, cap=0.0)
        wrong["cap a quarter too large"] = _with(model, cap=spec.cap * WRONG_FACTOR)
    if kind.sinks:
        wrong["no sinks"] = replace(
            model, layers=[{n: x for n, x in w.items() if n != "attn_sinks"} for w in model.layers]
        )
        wrong["sinks of the next heads"] = _weights(model, "attn_sinks", lambda w: np.roll(w["attn_sinks"], 1))
    if kind.head_norm:
        wrong["no norms of heads"] = _as_if(model, head_norm="")
        for name in ("attn_q_norm", "attn_k_norm"):
            wrong[f"{name} without its weight"] = _weights(model, name, lambda w, name=name: np.ones_like(w[name]))
    if spec.window:
        wrong["window one longer"] = _with(model, window=spec.window + 1)
        wrong["no windows"] = _with(model, window=10**6)
    if spec.rope_base_local:
        wrong["one base for all layers"] = _with(model, rope_base_local=0.0)
    if spec.n_rot:
        wrong["all of a head rotated"] = _with(model, n_rot=0)
    wrong["other pairs rotated"] = _as_if(model, halves=not kind.halves)
    if "attn_k" in kind.biases:
        wrong["no bias of K"] = _weights(model, "attn_k.bias", lambda w: np.zeros_like(w["attn_k.bias"]))
    return wrong


def wrong_last_logits(model: TinyModel) -> dict[str, TinyModel]:
    """Models whose last logits are wrong, and nothing before."""
    spec = model.spec
    wrong = {}
    if spec.final_cap:
        wrong["no last cap"] = _with(model, final_cap=0.0)
        wrong["last cap a quarter too large"] = _with(model, final_cap=spec.final_cap * WRONG_FACTOR)
    if spec.logit_scale != 1.0:
        wrong["last logits not scaled"] = _with(model, logit_scale=1.0)
    return wrong


def wrong_scores(reference: Reference) -> dict[str, Reference]:
    """Sequences with the right Q, K and V whose scores go another way than attention."""
    spec = reference.model.spec

    def with_softmaxes(change: Callable[[Softmax], Softmax]) -> Reference:
        twin = reference.fork()
        twin.softmaxes = [change(softmax) for softmax in reference.softmaxes]
        return twin

    def scaled(softmax: Softmax, factor: float) -> Softmax:
        known = 1 / float(np.sqrt(spec.head_size)) if softmax.scale is None else softmax.scale
        return replace(softmax, scale=known * factor)

    wrong = {"scored with a scale a quarter too large": with_softmaxes(lambda s: scaled(s, WRONG_FACTOR))}
    if spec.kind.scale_query:
        wrong["scored with the scale twice"] = with_softmaxes(lambda s: scaled(s, spec.query_scale))
    elif spec.scale is not None:
        wrong["scored with the scale of the head's size"] = with_softmaxes(lambda s: replace(s, scale=None))
    if spec.cap:
        wrong["scored without the cap"] = with_softmaxes(lambda s: replace(s, cap=0.0))
    if spec.kind.sinks:
        wrong["scored without the sinks"] = with_softmaxes(lambda s: replace(s, sinks=None))
    size = rotation_size_k(spec.head_size, reference.type_k)
    if size:
        # the rotation is its own inverse
        twin = reference.fork()
        twin.q = [rotate(q, size) for q in reference.q]
        wrong["scored with queries that are not rotated as K is"] = twin
    return wrong
