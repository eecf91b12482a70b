"""kvpress as an arm of ``python -m bench.peers``: the requests of llama_dge/benchmark/worker.py, in torch.

Run by file name in the interpreter of build/peers-venv, which has nothing of this project.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the file is here

import kvpress
import torch
import transformers


def rss() -> int:
    """Return the bytes of this process that are in memory."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


class Arm:
    """A transformers model that reads a prompt with a press, or without one."""

    def __init__(self) -> None:
        self._model: Any = None
        self._press: Any = None
        self._settings: dict[str, int] | None = None
        self._prompt: list[int] = []
        self._cache: Any = None
        self._logits: Any = None
        self._next = 0
        self._position = 0
        self._kept: list[list[list[int]]] = []

    def load(self, model: str, n_threads: int, record: bool = False, **press: int) -> dict[str, Any]:
        """Load a GGUF file as f32; `press` has window, kernel and budget of SnapKVPress, or nothing."""
        torch.set_num_threads(n_threads)
        torch.set_grad_enabled(False)
        path = Path(model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.set_press(record=record, **press)
        return {
            "kvpress": kvpress.__version__ if hasattr(kvpress, "__version__") else None,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "attention": self._model.config._attn_implementation,
            "n_vocab": self._model.config.vocab_size,
        }

    def set_press(self, record: bool = False, **press: int) -> None:
        """Change the press for the prompts to come. `record`: note which rows it keeps, which takes longer."""
        self._settings = press or None
        self._press = None
        if not press:
            return
        self._press = kvpress.SnapKVPress(window_size=press["window"], kernel_size=press["kernel"])
        if not record:
            return
        compress = self._press.compress

        def recording(module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            # the press gathers values by the rows that it keeps, and scores without them: positions tell the rows
            positions = torch.arange(keys.shape[2]).view(1, 1, -1, 1).expand(values.shape)
            _, rows = compress(module, hidden, keys, positions, attentions, kwargs)
            self._kept.append([sorted(head) for head in rows[0, :, :, 0].tolist()])
            return compress(module, hidden, keys, values, attentions, kwargs)

        self._press.compress = recording

    def reset(self, prompt: list[int]) -> None:
        """Forget everything and take a new prompt."""
        self._prompt, self._cache, self._kept, self._logits, self._position = prompt, None, [], None, 0

    def evaluate(self, start: int, stop: int) -> list[float]:
        """Evaluate the whole prompt, in one piece, as a press needs it."""
        if (start, stop) != (0, len(self._prompt)):
            raise ValueError(f"a press reads {len(self._prompt)} tokens at once, not {start} .. {stop}")
        before = self._now()
        self._cache = transformers.DynamicCache()
        if self._press is None:
            self._forward(self._prompt)
        else:
            # the press keeps int(n * (1 - ratio)) rows; the half keeps rounding from losing one
            self._press.compression_ratio = 1 - (self._settings["budget"] + 0.5) / len(self._prompt)  # type: ignore[index]
            with self._press(self._model):
                self._forward(self._prompt)
        return self._since(before)

    def first(self) -> list[float]:
        """Sample the first token of the answer."""
        before = self._now()
        self._next = int(self._logits.argmax())
        return self._since(before)

    def step(self, n: int) -> list[list[float]]:
        """Decode n tokens. Returns the time of each."""
        times = []
        for _ in range(n):
            before = self._now()
            self._forward([self._next])
            self._next = int(self._logits.argmax())
            times.append(self._since(before))
        return times

    def logits(self) -> list[float]:
        """Return the logits that follow the newest token."""
        values: list[float] = self._logits.tolist()
        return values

    def kept(self) -> list[list[list[int]]]:
        """Return the positions that each layer and KV head kept, ascending."""
        return self._kept

    def memory(self) -> dict[str, int]:
        """Return the bytes in use now."""
        kv = sum(t.numel() * t.element_size() for layer in self._cache.layers for t in (layer.keys, layer.values))
        return {"rss": rss(), "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "kv": kv}

    def _forward(self, tokens: list[int]) -> None:
        # positions are those of the text, however few rows the cache holds
        positions = torch.arange(self._position, self._position + len(tokens)).unsqueeze(0)
        ids = torch.tensor([tokens])
        out = self._model(input_ids=ids, past_key_values=self._cache, position_ids=positions, logits_to_keep=1)
        self._logits = out.logits[0, -1]
        self._position += len(tokens)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def _since(self, before: tuple[float, float]) -> list[float]:
        after = self._now()
        return [after[0] - before[0], after[1] - before[1]]


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints goes to stderr
    arm = Arm()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(arm, request.pop("do"))(**request)}
        except Exception as error:  # the parent reports it, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
