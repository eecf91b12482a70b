"""Metrics of LongBench: how good an answer is, 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Return the words that count: lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of the answer's words."""
    mine, right = words(answer), words(truth)
    common = sum((Counter(mine) & Counter(right)).values())
    return 2 * common / (len(mine) + len(right)) if common else 0.0


def rouge_l(answer: str, truth: str) -> float:
    """Return ROUGE-L, the F measure.

    Raises
    ------
    ImportError
        The library is not installed: it comes with the extra ``eval``.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ImportError("ROUGE-L needs rouge-score: pip install 'llama-dge[eval]'") from error
    return float(RougeScorer(["rougeL"]).score(truth, answer)["rougeL"].fmeasure)


def classification(answer: str, truth: str, classes: Sequence[str]) -> float:
    """Return the share that the right class has of those that are named.

    A class whose name is part of the right one's is not counted.
    """
    named = [name for name in classes if name in answer and not (name in truth and name != truth)]
    return 1 / len(named) if truth in named else 0.0


def _share(answer: str, want: str) -> float:
    found = re.findall(r"\d+", answer)
    return found.count(want) / len(found) if found else 0.0


def retrieval(answer: str, truth: str) -> float:
    """Return the share of the answer's numbers that are the paragraph's."""
    match = re.search(r"Paragraph (\d+)", truth)
    if match is None:
        raise ValueError(f'"{truth}" names no paragraph')
    return _share(answer, match.group(1))


def count(answer: str, truth: str) -> float:
    """Return the share of the answer's numbers that are right."""
    return _share(answer, truth.strip())


def code_similarity(answer: str, truth: str) -> float:
    """Return how alike the first line of code of the answer is, rounded to hundredths.

    Raises
    ------
    ImportError
        The library is not installed: it comes with the extra ``eval``.
    """
    try:
        from rapidfuzz.fuzz import ratio
    except ImportError as error:
        raise ImportError("the similarity of code needs rapidfuzz: pip install 'llama-dge[eval]'") from error
    lines = (line for line in answer.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    return round(ratio(next(lines, ""), truth)) / 100
