"""The text that stands for an arm of an evaluation."""

from __future__ import annotations

import re

import pytest

from llama_dge import DGEConfig
from llama_dge.eval.arms import parse_arm, parse_arms


def test_full() -> None:
    arm = parse_arm("full")
    assert arm.name == "full" and arm.config is None and not arm.sums


def test_settings() -> None:
    arm = parse_arm("snapkv:k=1,scores=policy,budget=128")
    assert arm.config == DGEConfig(
        draft_tokens=1, scores="policy", draft_pooling="none", budget=128, new_turn="reprefill", elastic=False
    )
    assert parse_arm("snapkv:refresh=auto,refresh_mass=0.8,budget=64").config.refresh_mass == 0.8  # type: ignore[union-attr]
    assert parse_arm("snapkv:budget=0.25").config.budget == 0.25  # type: ignore[union-attr]
    dge = parse_arm(" dge ", budget=64).config
    assert dge is not None and (dge.scores, dge.draft_tokens, dge.draft_pooling) == ("draft", 2, "none")  # the paper's
    assert parse_arm("pyramidkv:budget=64,layer_budgets=reference").config.layer_budgets == "reference"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text, same_as",
    [
        ("dge:k=2,budget=64", "snapkv:draft_tokens=2,scores=draft,budget=64"),
        ("dge:refresh=4,refresh_overlap=true,budget=64", "dge:refresh_overlap=true,refresh=4,budget=64"),
        ("snapkv:budget=64,k=1,scores=policy", "snapkv:scores=policy,k=1,budget=64"),
    ],
)
def test_equal_settings_have_one_name(text: str, same_as: str) -> None:
    arm = parse_arm(text)
    assert arm == parse_arm(same_as)
    assert parse_arm(arm.name) == arm


def test_h2o_needs_sums() -> None:
    assert parse_arm("h2o:scores=policy").sums and parse_arm("h2o:scores=both").sums
    assert not parse_arm("h2o").sums and not parse_arm("snapkv:scores=policy").sums


def test_budgets() -> None:
    arms = parse_arms(["dge", "snapkv:budget=16", "full", "full"], [32, 64])
    assert [arm.name for arm in arms] == [
        "full",
        "snapkv:k=2,budget=32",
        "snapkv:k=2,budget=16",
        "snapkv:k=2,budget=64",
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", '"" is none of full, dge, snapkv'),
        ("snap", '"snap" is none of'),
        ("full:k=1", 'full has no settings, so "k=1"'),
        ("snapkv:", "nothing follows the colon"),
        ("snapkv:k", '"k" is not of the form NAME=VALUE'),
        ("snapkv:k=", '"k=" is not of the form'),
        ("snapkv:k=two", '"k=two": two is not a number'),
        ("snapkv:depth=2", 'no setting "depth"'),
        ("snapkv:elastic=True", 'no setting "elastic"'),
        ("snapkv:k=1,draft_tokens=2", '"draft_tokens" is there twice'),
        ("snapkv:refresh_overlap=1", "1 is neither true nor false"),
        ("snapkv:scores=none", "scores='none'"),
        ("snapkv:budget=4", "window=8: must be at most budget=4"),
        ("dge:scores=policy", '"scores=policy" is not dge'),
        ("snapkv:scores=both,refresh=4", 'scores="both": with refresh=4'),
    ],
)
def test_errors_name_the_part(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_arm(text)
    assert f'arm "{text}": ' in str(error.value)
