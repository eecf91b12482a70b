#!/usr/bin/env python3
"""Compute what an eviction costs on a device: operations, bytes, and the least time that they take (docs/gpu.md).

A roofline: each step takes the longer of its arithmetic and its memory traffic, at the device's published peaks.
Nothing here is measured.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

DOC = Path(__file__).resolve().parent.parent / "docs/gpu.md"
BEGIN, END = "<!-- scripts/gpu_cost.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Device:
    """Peaks as published.

    Parameters
    ----------
    name
        of the device
    flops
        f32 operations per second, without matrix units
    matrix
        f16 operations per second of its matrix units, summed in f32
    memory
        bytes per second of its memory
    link
        bytes per second to and from host memory
    mma
        the score's products are made by its matrix units
    """

    name: str
    flops: float
    matrix: float
    memory: float
    link: float
    mma: bool


@dataclass(frozen=True)
class Model:
    """What decides the size of a cache: Llama 3 8B.

    Parameters
    ----------
    n_layer, n_head, n_head_kv, n_embd_head
        as in the file of the model
    n_params
        weights that each token passes
    """

    n_layer: int = 32
    n_head: int = 32
    n_head_kv: int = 8
    n_embd_head: int = 128
    n_params: float = 7.5e9


@dataclass(frozen=True)
class Step:
    """A part of an eviction.

    Parameters
    ----------
    name
        of the step
    flops
        operations in f32
    memory, link
        bytes of device memory, and over the link
    products
        those of ``flops`` that matrix units can take
    halves
        products of halves in place of each of these
    """

    name: str
    flops: float
    memory: float
    link: float
    products: float = 0
    halves: int = 0

    def seconds(self, device: Device) -> float:
        """Return the least time on a device."""
        arithmetic = self.flops / device.flops
        if device.mma:
            arithmetic = (self.flops - self.products) / device.flops + self.halves * self.products / device.matrix
        return max(arithmetic, self.memory / device.memory) + self.link / device.link


# M2 Max: host and device share the memory, so a copy over the "link" reads and writes it
DEVICES = (
    Device("RTX 4090", 82.6e12, 165e12, 1008e9, 32e9, True),
    Device("M2 Max (38 cores)", 13.6e12, 13.6e12, 400e9, 200e9, False),
    Device("H200", 67e12, 989e12, 4800e9, 64e9, True),
)

BYTES = {"f16": 2.0, "q8_0": 34 / 32}
# native/ggml/cuda/attn-score-mma.cuh: a query is two halves, and so is a row of quantised K; low by low is left out
HALVES = {"f16": 2, "q8_0": 3}

SCORE, PARK, DEVICE = "score (attn-score)", "host copy", "compact on the device"
HOST = "compact on the host, where the device cannot"

# the last two lines of each prompt length: steps of an eviction, as a share of its prefill
SHARES = {"eviction / prefill": (SCORE, PARK, DEVICE), '... with `park="off"`': (SCORE, DEVICE)}


def steps(model: Model, n_kv: int, n_rows: int, budget: int, cache: str) -> list[Step]:
    """Return the steps of evicting one sequence, all layers.

    Parameters
    ----------
    model
        its shape
    n_kv
        entries of the prompt
    n_rows
        queries that score: window + draft_tokens - 1
    budget
        entries kept per layer and KV head
    cache
        type of K and V
    """
    heads, heads_kv = model.n_layer * model.n_head, model.n_layer * model.n_head_kv
    row = model.n_embd_head * BYTES[cache]

    # logits twice: 2 operations per product, and about 8 for scale, mask, maximum, exponential, sums
    products = 4.0 * n_kv * n_rows * heads * model.n_embd_head
    score = products + 16.0 * n_kv * n_rows * heads
    k_bytes = n_kv * heads_kv * row
    scores = 4.0 * n_kv * heads_kv
    kept = 2 * budget * heads_kv * row
    index = 4.0 * budget * heads_kv
    # rows that stay are read, written to temporary memory, read, written; those of one layer twice, for the rehearsal
    gather = 4 * kept * (1 + 1 / model.n_layer)
    # ... and copied when the cache moves into smaller buffers
    shrink = 2 * kept
    return [
        Step(SCORE, score, 2 * k_bytes + scores, scores, products, HALVES[cache]),
        Step(PARK, 0, 2 * k_bytes, 2 * k_bytes),
        Step(DEVICE, 0, gather + index + shrink, index),
        # K and V of all rows leave the device, which they do for the park in any case; what stays comes back
        Step(HOST, 0, 2 * k_bytes + kept + shrink, 2 * k_bytes + kept),
    ]


def prefill(model: Model, n_kv: int) -> float:
    """Return the operations of the prefill of ``n_kv`` tokens."""
    attention = 4.0 * n_kv * n_kv / 2 * model.n_embd_head * model.n_head * model.n_layer
    return 2 * model.n_params * n_kv + attention


def table(n_rows: int, budget: int) -> str:
    """Return the table of docs/gpu.md."""
    model = Model()
    lines = [
        "| tokens, cache | step | GFLOP | device memory, MB | link, MB | " + " | ".join(d.name for d in DEVICES) + " |"
    ]
    lines.append("| --- | --- |" + " ---: |" * (3 + len(DEVICES)))
    for n_kv in (4096, 8192, 32768):
        for cache in BYTES:
            for step in steps(model, n_kv, n_rows, budget, cache):
                times = " | ".join(f"{1e3 * step.seconds(device):.2f} ms" for device in DEVICES)
                lines.append(
                    f"| {n_kv}, {cache} | {step.name} | {step.flops / 1e9:.1f} | {step.memory / 1e6:.0f} "
                    f"| {step.link / 1e6:.0f} | {times} |"
                )
        flops = prefill(model, n_kv)
        times = " | ".join(f"{1e3 * flops / device.matrix:.0f} ms" for device in DEVICES)
        lines.append(f"| {n_kv} | prefill, for comparison | {flops / 1e9:.0f} | | | {times} |")
        for name, names in SHARES.items():
            seconds = [
                sum(s.seconds(d) for s in steps(model, n_kv, n_rows, budget, "f16") if s.name in names) for d in DEVICES
            ]
            shares = " | ".join(f"{100 * t * d.matrix / flops:.1f} %" for t, d in zip(seconds, DEVICES))
            lines.append(f"| {n_kv}, f16 | {name} | | | | {shares} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="what an eviction costs on a device, by its published peaks")
    parser.add_argument("--rows", type=int, default=15, help="queries that score: window + draft_tokens - 1")
    parser.add_argument("--budget", type=int, default=1024, help="entries kept per layer and KV head")
    parser.add_argument("--write", action="store_true", help="write the table into docs/gpu.md")
    args = parser.parse_args()
    text = table(args.rows, args.budget)
    if args.write:
        doc = DOC.read_text(encoding="utf-8")
        before, rest = doc.split(BEGIN, 1)
        DOC.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
