"""LongBench (arXiv 2308.14508): its English sets, from files that the user has, by its protocol.

Two layouts of a line are read: that of the data set (`input`, `context`, `answers`, `all_classes`), for which the
instructions below are our own wording, so that figures differ a little from published ones; and one with the whole
`prompt` in it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import scores
from .engine import Stop
from .prompts import Prompt, Prompter

Metric = Callable[[str, str, Sequence[str]], float]


def _plain(metric: Callable[[str, str], float]) -> Metric:
    return lambda answer, truth, classes: metric(answer, truth)


_F1, _ROUGE, _CODE = _plain(scores.f1), _plain(scores.rouge_l), _plain(scores.code_similarity)
_RETRIEVAL, _COUNT = _plain(scores.retrieval), _plain(scores.count)


@dataclass(frozen=True)
class Set:
    """How one set is asked and judged.

    `chat`: with the model's chat template. `first_line`: only that of the answer counts. `template` is the prompt of a
    line that has none, in our words.
    """

    metric: Metric
    max_tokens: int
    template: str
    chat: bool = True
    first_line: bool = False


_PASSAGES = (
    "Read these passages and answer the question below. Give the answer alone, without any explanation.\n\n"
    "{context}\n\nQuestion: {input}\nAnswer:"
)
_CODE_TEMPLATE = "Write the next line of this code.\n{context}{input}Next line of code:\n"

SETS: dict[str, Set] = {
    "narrativeqa": Set(
        _F1,
        128,
        "Here is a story. Answer the question below it as briefly as possible, with a phrase if that is enough, and "
        "without any explanation.\n\n{context}\n\nQuestion: {input}\nAnswer:",
    ),
    "qasper": Set(
        _F1,
        128,
        "Here is a scientific article. Answer the question below it as briefly as possible. If the article does not "
        'tell, write "unanswerable"; if it is a question of yes or no, write "yes", "no" or "unanswerable". '
        "Explain nothing.\n\n{context}\n\nQuestion: {input}\nAnswer:",
    ),
    "multifieldqa_en": Set(
        _F1, 64, "Read this text and answer the question below it briefly.\n\n{context}\n\nQuestion: {input}\nAnswer:"
    ),
    "hotpotqa": Set(_F1, 32, _PASSAGES),
    "2wikimqa": Set(_F1, 32, _PASSAGES),
    "musique": Set(_F1, 32, _PASSAGES),
    "gov_report": Set(
        _ROUGE, 512, "Here is a government agency's report. Summarise it on one page.\n\n{context}\n\nSummary:"
    ),
    "qmsum": Set(
        _ROUGE,
        512,
        "Here is the transcript of a meeting, and then a question or a task about it. Answer in a few sentences.\n\n"
        "{context}\n\nTask: {input}\nAnswer:",
    ),
    "multi_news": Set(_ROUGE, 512, "Here are some news articles. Summarise them on one page.\n\n{context}\n\nSummary:"),
    "trec": Set(
        scores.classification,
        64,
        "Name the type of the last question, as the examples do.\n\n{context}\n{input}",
        chat=False,
        first_line=True,
    ),
    "triviaqa": Set(
        _F1,
        32,
        "Answer the last question from its passage, with the answer alone, as the examples do.\n\n{context}\n\n{input}",
        chat=False,
        first_line=True,
    ),
    "samsum": Set(
        _ROUGE,
        128,
        "Summarise the last dialogue in a few short sentences, as the examples do.\n\n{context}\n\n{input}",
        chat=False,
        first_line=True,
    ),
    "passage_count": Set(
        _COUNT,
        32,
        "Some of these paragraphs may be repeated. Count how many different ones there are, and give that number alone."
        "\n\n{context}\n\nNumber of different paragraphs:",
    ),
    "passage_retrieval_en": Set(
        _RETRIEVAL,
        32,
        "Here are numbered paragraphs and a summary of one of them. Say which one, in the form: Paragraph 1.\n\n"
        "{context}\n\nSummary: {input}\n\nThe summary is of:",
    ),
    "lcc": Set(_CODE, 64, _CODE_TEMPLATE, chat=False),
    "repobench-p": Set(_CODE, 64, _CODE_TEMPLATE, chat=False),
}


def _list(value: Any) -> list[str]:
    """Read a list, or a list that was written as a text."""
    if isinstance(value, str):
        try:
            listed = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            listed = None
        value = listed if isinstance(listed, (list, tuple)) else [value]
    if value is None:
        return []
    return [str(item) for item in (value if isinstance(value, (list, tuple)) else [value])]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of JSON lines.

    Raises
    ------
    ValueError
        A line is not an object, has no answers, or is not UTF-8.
    """
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"{path.name} is empty: a JSON object a line is expected")
    # not splitlines(): a text may have U+2028 in it
    for i, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {i}: {error}") from None
        whole = isinstance(entry, dict) and "answers" in entry
        if not whole or (entry.get("prompt") is None and entry.get("context") is None):
            raise ValueError(f'{path.name}, line {i}: needs "answers", and "prompt" or "context"')
        if not all(isinstance(entry.get(name) or "", str) for name in ("prompt", "context", "input")):
            raise ValueError(f'{path.name}, line {i}: "prompt", "context" and "input" must be texts')
        yield entry


def longbench_prompts(
    folder: Path, prompter: Prompter, *, max_prompt: int, sets: Sequence[str] | None = None, limit: int | None = None
) -> list[Prompt]:
    """Make the prompts of a folder of ``SET.jsonl``.

    Parameters
    ----------
    folder
        With the files.
    prompter
        Of the model.
    max_prompt
        Tokens of a prompt; of a longer one the middle is left out, before the chat template is put round it.
    sets
        Which; by default those whose files are there.
    limit
        Prompts of a set at most.

    Raises
    ------
    ValueError
        An unknown set, no file, or a line that is not of either layout.
    """
    names = [name for name in SETS if (folder / f"{name}.jsonl").is_file()] if sets is None else list(sets)
    if not names:
        raise ValueError(f"{folder} has no file of a set of LongBench, such as qasper.jsonl")
    prompts = []
    for name in names:
        if name not in SETS:
            raise ValueError(f"set {name}: must be one of {', '.join(SETS)}")
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            raise ValueError(f"there is no {path}")
        rule = SETS[name]
        for i, entry in enumerate(read_lines(path)):
            if limit is not None and i >= limit:
                break
            text = entry.get("prompt")
            if text is None:
                text = rule.template.format(context=entry["context"], input=entry.get("input") or "")
            tokens = prompter.tokens(prompter.cut_middle(text, max_prompt), chat=None if rule.chat else False)
            prompts.append(
                Prompt(
                    task="longbench",
                    set=name,
                    id=f"{name}/{entry.get('_id', entry.get('index', i))}",
                    tokens=tuple(tokens),
                    expected=tuple(_list(entry["answers"])),
                    info={
                        "classes": _list(entry.get("all_classes")),
                        "max_prompt": max_prompt,
                        "style": "chat" if rule.chat and prompter.chat else "completion",
                    },
                )
            )
    return prompts


def score(answer: str, prompt: Prompt) -> float:
    """Return the best score of an answer over the right ones, 0 to 1."""
    rule = SETS[prompt.set]
    if rule.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return max((rule.metric(answer, truth, prompt.info["classes"]) for truth in prompt.expected), default=0.0)


def check_libraries(prompts: Sequence[Prompt]) -> None:
    """Raise ImportError where a metric of these prompts needs a library that is not there."""
    for name in {prompt.set for prompt in prompts}:
        if SETS[name].metric in (_ROUGE, _CODE):
            SETS[name].metric("a", "a", ())


def max_tokens(prompt: Prompt, most: int | None = None) -> int:
    """Return the length of an answer by the protocol, or `most` if that is less."""
    return min(SETS[prompt.set].max_tokens, most or SETS[prompt.set].max_tokens)


def stop(prompt: Prompt) -> Stop | None:
    """Return what ends an answer: the first line's end, where nothing after it counts."""
    if not SETS[prompt.set].first_line:
        return None
    return lambda raw: b"\n" in raw.lstrip(b"\n")
