"""Metrics of the evaluation against values that were computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llama_dge.eval import scores
from llama_dge.eval.metrics import kl_divergence, log_softmax, paired_bootstrap, wilson
from llama_dge.eval.needle import hit


def test_log_softmax() -> None:
    np.testing.assert_allclose(log_softmax([0.0, math.log(3.0)]), [math.log(0.25), math.log(0.75)], atol=1e-15)
    # neither overflow nor underflow, and float32 goes in
    np.testing.assert_allclose(log_softmax(np.array([1e4, 0.0], np.float32)), [0.0, -1e4])


def test_kl_divergence() -> None:
    p, q = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    # 1/2 log 2 + 1/2 log(2/3)
    assert kl_divergence(p, q) == pytest.approx(0.5 * math.log(4 / 3), abs=1e-15)
    assert kl_divergence(p, p) == 0.0
    with np.errstate(divide="ignore"):
        assert kl_divergence(np.log([1.0, 0.0]), np.log([0.5, 0.5])) == pytest.approx(math.log(2))


def test_wilson() -> None:
    # 8 of 10, from the formula with z = 1.96
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=2e-4)
    low, high = wilson(0, 10)
    assert low == 0.0 and high == pytest.approx(0.2775, abs=2e-4)
    assert wilson(10, 10)[1] == 1.0
    assert wilson(0, 0) == (0.0, 1.0)


def test_paired_bootstrap() -> None:
    assert paired_bootstrap([[1.0, 1.0], [3.0]]) == (2.0, 2.0, 2.0)  # a mean of sets, not of prompts
    mean, low, high = paired_bootstrap([[0.0, 1.0] * 50])
    assert mean == 0.5
    # a share of 1/2 over 100: 0.5 -+ 1.96 * 0.05
    assert low == pytest.approx(0.402, abs=0.03) and high == pytest.approx(0.598, abs=0.03)
    assert paired_bootstrap([[0.0, 1.0] * 50]) == (mean, low, high)
    with pytest.raises(ValueError, match="no differences"):
        paired_bootstrap([[]])


@pytest.mark.parametrize(
    "answer, truth, want",
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat", "dog", 0.0),
        ("", "dog", 0.0),
        ("red cat", "cat", 2 / 3),  # precision 1/2, recall 1
        ("cat cat", "cat", 2 / 3),  # the second one does not count
        ("It's 5,000", "its 5000", 1.0),
    ],
)
def test_f1(answer: str, truth: str, want: float) -> None:
    assert scores.f1(answer, truth) == pytest.approx(want)


def test_rouge_l() -> None:
    pytest.importorskip("rouge_score")
    # the longest common subsequence of 4 and 5 words has 3: precision 3/4, recall 3/5
    assert scores.rouge_l("the cat sat down", "the black cat sat there") == pytest.approx(2 * 3 / (4 + 5))
    assert scores.rouge_l("", "word") == 0.0


def test_classification() -> None:
    classes = ["Food", "Date", "Order", "Order, rank"]
    assert scores.classification("Type: Food", "Food", classes) == 1.0
    assert scores.classification("Food or Date", "Food", classes) == 0.5
    assert scores.classification("Date", "Food", classes) == 0.0
    assert scores.classification("Order, rank", "Order, rank", classes) == 1.0  # "Order" is a part of it
    assert scores.classification("nothing", "Food", classes) == 0.0


def test_numbers_of_paragraphs() -> None:
    assert scores.retrieval("Paragraph 19", "Paragraph 19") == 1.0
    assert scores.retrieval("Paragraph 19 or 3", "Paragraph 19") == 0.5
    assert scores.retrieval("none", "Paragraph 19") == 0.0
    assert scores.retrieval("Paragraph 191", "Paragraph 19") == 0.0
    with pytest.raises(ValueError, match="names no paragraph"):
        scores.retrieval("1", "one")
    assert scores.count("There are 46.", "46") == 1.0
    assert scores.count("46 of 50", "46") == 0.5
    assert scores.count("", "46") == 0.0


def test_code_similarity() -> None:
    pytest.importorskip("rapidfuzz")
    assert scores.code_similarity("return x\nmore", "return x") == 1.0
    assert scores.code_similarity("```python\n# a comment\n// one more\nreturn x", "return x") == 1.0
    # 4 characters each, 3 in common: 2 * 3 / 8
    assert scores.code_similarity("abcd", "abce") == 0.75
    assert scores.code_similarity("", "abc") == 0.0


def test_hit() -> None:
    assert hit("It is 12,345.", ["12345"]) == 1.0
    assert hit("It is 123456.", ["12345"]) == 0.0
    assert hit("He lives in OSLO!", ["Oslo"]) == 1.0
    assert hit("tinted", ["tin"]) == 0.0
    assert hit("They are 12345,67890 and 5.", ["12345", "67890", "4", "5"]) == 0.75
