"""The text that stands for an arm of an evaluation."""

from __future__ import annotations

import re

import pytest

from llama_dge import DGEConfig
from llama_dge.config import POLICIES, PRESETS
from llama_dge.eval.arms import parse_arm, parse_arms, without_budget

SHARED = {"new_turn": "reprefill", "elastic": False}


def test_full() -> None:
    arm = parse_arm("full")
    assert arm.name == "full" and arm.config is None and not arm.sums


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str) -> None:
    arm = parse_arm(preset, 64)
    want = DGEConfig.preset(preset, budget=64, **SHARED)
    assert arm.name == f"{preset}:budget=64" and arm.config is not None
    # "auto" is resolved, so that equal settings are equal
    assert arm.config == DGEConfig.preset(preset, budget=64, scores=arm.config.scores, **SHARED)
    assert arm.config.ranks_by == want.ranks_by


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_the_one_published(policy: str) -> None:
    arm = parse_arm(policy, 64)
    assert arm.name == f"{policy}:budget=64"
    assert arm.config == DGEConfig(policy=policy, draft_tokens=1, scores="policy", budget=64, **SHARED)


@pytest.mark.parametrize(
    "text, settings",
    [
        ("snapkv:k=2,budget=128", {"draft_tokens": 2, "scores": "policy", "budget": 128}),
        ("snapkv:budget=0.25", {"draft_tokens": 1, "scores": "policy", "budget": 0.25}),
        ("dge:budget=64", {"draft_tokens": 2, "scores": "draft", "pooling": "none", "budget": 64}),
        ("default:recall=auto,recall_mass=0.8", {"recall": "auto", "recall_mass": 0.8}),
        ("recall:recall_async=true,k=2", {"recall": 4, "recall_async": True, "draft_tokens": 2}),
        # the latest queries rank: the policy's own score is none of it
        ("h2o:recall=4", {"policy": "h2o", "recall": 4, "draft_tokens": 1}),
        ("pyramidkv:layer_budgets=reference", {
            "policy": "pyramidkv", "layer_budgets": "reference", "draft_tokens": 1, "scores": "policy"
        }),
    ],
)  # fmt: skip
def test_settings(text: str, settings: dict[str, object]) -> None:
    assert parse_arm(text).config == DGEConfig(**{**SHARED, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text, name",
    [
        ("snapkv:scores=policy,k=2,budget=64", "snapkv:k=2,budget=64"),
        ("default:k=2,pooling=none,budget=64", "paper:budget=64"),
        ("default:scores=draft,budget=64", "default:budget=64"),
        ("snapkv:k=8,scores=draft,budget=64", "default:budget=64"),
        ("recall:recall=16,budget=64", "default:recall=16,budget=64"),
        ("default:recall=4,k=2,budget=64", "recall:k=2,budget=64"),
        ("recall:recall_async=true,recall=4,budget=64", "recall:recall_async=true,budget=64"),
        ("dge:head_budgets=adaptive,budget=64", "paper:head_budgets=adaptive,budget=64"),
        ("h2o:recall=4,scores=auto,budget=64", "h2o:recall=4,budget=64"),
    ],
)
def test_equal_settings_have_one_name(text: str, name: str) -> None:
    arm = parse_arm(text)
    assert arm.name == name and parse_arm(name) == arm


def test_h2o_needs_sums() -> None:
    assert parse_arm("h2o").sums and parse_arm("h2o:scores=both").sums
    assert not parse_arm("h2o:scores=draft").sums and not parse_arm("snapkv").sums
    assert not parse_arm("h2o:recall=4").sums


def test_budgets() -> None:
    arms = parse_arms(["paper", "default:budget=16", "full", "full"], [32, 64])
    assert [arm.name for arm in arms] == ["full", "paper:budget=32", "default:budget=16", "paper:budget=64"]
    assert [without_budget(name) for name in ("full", "paper:budget=32", "snapkv:k=2,budget=0.5")] == [
        "full",
        "paper",
        "snapkv:k=2",
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", '"" is none of full, dge, default, paper, recall'),
        ("snap", '"snap" is none of'),
        ("full:k=1", 'full has no settings, so "k=1"'),
        ("snapkv:", "nothing follows the colon"),
        ("snapkv:k", '"k" is not of the form NAME=VALUE'),
        ("snapkv:k=", '"k=" is not of the form'),
        ("snapkv:k=two", "draft_tokens=two: must be an int"),
        ("snapkv:depth=2", 'no setting "depth"'),
        ("snapkv:elastic=True", 'no setting "elastic"'),
        ("snapkv:k=1,draft_tokens=2", '"draft_tokens" is there twice'),
        ("recall:recall_async=1", "recall_async=1: must be true or false"),
        ("snapkv:scores=none", 'scores="none": must be'),
        ("snapkv:budget=4", "budget=4: must be at least 8"),
        ("default:scores=both,recall=4", 'scores="both": must be'),
        ("default:draft_pooling=max", '"draft_pooling" is called pooling'),
        ("default:refresh=4", '"refresh" is called recall'),
    ],
)
def test_errors_name_the_part(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_arm(text)
    assert f'arm "{text}": ' in str(error.value)
