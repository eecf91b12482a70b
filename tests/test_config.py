"""DGEConfig: what it accepts, and what it says about everything else."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_dge import DGEConfig
from llama_dge.config import POLICIES, RANGES

NAN = float("nan")
INF = float("inf")

INTEGER_FIELDS = {"draft_tokens": 1, "window": 1, "kernel_size": 1, "sinks": 0}
CHOICES = {
    "policy": tuple(POLICIES),  # of the library: test_budgets.py knows them
    "scores": ("auto", "draft", "policy", "both"),
    "pooling": ("none", "max", "avg"),
    "layer_budgets": ("exact", "reference"),
    "head_budgets": ("uniform", "adaptive"),
    "new_turn": ("restore", "append", "reprefill"),
    "park": ("ram", "disk", "off"),
}
MAX_ROWS = 2**24
NOT_INTEGERS = [True, False, 1.0, 2.5, NAN, INF, "8", None, [8], b"8", -(2**31) - 1]
TOO_LARGE = [MAX_ROWS + 1, 2**31, 2**63, 10**30]


class Policy:
    """The smallest policy of one's own; equal ones are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy)

    def __hash__(self) -> int:
        return 1

    def select(self, scores: Any, n_rows: int, layer: int) -> Any:
        return [[]] * len(scores)


def _bad_values() -> list[tuple[str, Any]]:
    bad: list[tuple[str, Any]] = []
    for field, least in INTEGER_FIELDS.items():
        bad += [(field, value) for value in [least - 1, -1, *NOT_INTEGERS, *TOO_LARGE]]
    bad += [("kernel_size", value) for value in (2, 4, 100, MAX_ROWS)]
    for field in CHOICES:
        bad += [(field, value) for value in ("", "nope", "SNAPKV", None, 0, 1, True, NAN, {})]
    bad += [("budget", value) for value in (0, -1, 0.0, -0.5, 1.0001, 512.0, NAN, INF, -INF, True, False, "512", None)]
    bad += [("budget", value) for value in ([512], np.float32("nan"), np.bool_(True), 1j, *TOO_LARGE)]
    # tables that are none: empty, of one dimension, of three, and with something else than ints in it
    bad += [("head_budgets", value) for value in ([], [[]], [[64], []], [64, 64], 64, 0.5, [[[64]]], [64, [64]])]
    bad += [("head_budgets", [[64, value]]) for value in NOT_INTEGERS if not isinstance(value, int) or value is True]
    bad += [("head_budgets", value) for value in (np.full((2, 2), 64.0), np.full(4, 64), np.full((2, 2), True))]
    bad += [("policy", value) for value in (object(), b"snapkv", ["snapkv"], {"snapkv"}, Policy)]
    bad += [("strict", value) for value in (0, 1, None, "yes", NAN)]
    return bad


@pytest.mark.parametrize("field, value", _bad_values(), ids=repr)
def test_bad_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}=") as caught:
        DGEConfig(**{field: value})
    message = str(caught.value)
    assert (f'"{value}"' if isinstance(value, str) else repr(value)) in message
    assert "must be" in message


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(DGEConfig)])
def test_every_field_is_checked(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}="):
        DGEConfig(**{field: object()})


@pytest.mark.parametrize("field", CHOICES)
def test_message_names_the_choices(field: str) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        DGEConfig(**{field: "nope"})
    for choice in CHOICES[field]:
        assert f'"{choice}"' in str(caught.value)


@pytest.mark.parametrize(
    "settings, least",
    [
        ({"window": 9, "budget": 8}, 9),
        ({"budget": 7}, 8),  # the default window is 8
        ({"window": 2000}, 2000),  # the default budget is 1024
        ({"policy": "streamingllm", "budget": 16, "window": 8, "sinks": 9}, 17),
        ({"policy": "streamingllm", "budget": 11}, 12),
        ({"policy": "streamingllm", "sinks": 2000}, 2008),
    ],
    ids=str,
)
def test_budget_includes_what_is_always_kept(settings: dict[str, Any], least: int) -> None:
    with pytest.raises(ValueError, match=rf"^budget=\d+: must be at least {least}"):
        DGEConfig(**settings)
    config = DGEConfig(**{**settings, "budget": least})
    assert config.least_budget == config.budget


@pytest.mark.parametrize(
    "settings, allowed",
    [
        # the window is included, and the sinks where there are some
        ({"head_budgets": [[64, 7]]}, "8 .. "),
        ({"head_budgets": [[64, 64], [0, 64]]}, "8 .. "),
        ({"head_budgets": [[64, -5]]}, "8 .. "),
        ({"head_budgets": [[64, MAX_ROWS + 1]]}, f" .. {MAX_ROWS}"),
        ({"head_budgets": [[64, 10**30]]}, f" .. {MAX_ROWS}"),
        ({"head_budgets": [[64, 31]], "window": 32}, "32 .. "),
        ({"head_budgets": [[64, 11]], "policy": "streamingllm"}, "12 .. "),
        ({"head_budgets": [[64, 8]], "policy": "streamingllm", "sinks": 1}, "9 .. "),
        # entries are ranked by attention, or by the policy itself
        ({"head_budgets": "adaptive", "policy": "streamingllm"}, 'policy="streamingllm" does not'),
        ({"head_budgets": "adaptive", "policy": Policy()}, "does not"),
        ({"head_budgets": [[64]], "policy": Policy()}, "policy"),
    ],
    ids=str,
)
def test_head_budgets_that_do_not_fit(settings: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ValueError, match=r"^head_budgets") as caught:
        DGEConfig(**settings)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"budget": 1, "window": 1},
        {"budget": 8},
        {"budget": MAX_ROWS},
        {"kernel_size": MAX_ROWS - 1, "draft_tokens": MAX_ROWS, "sinks": MAX_ROWS},
        {"budget": 1.0},
        {"budget": 1e-6},
        {"budget": 0.01, "window": 500},  # the share is resolved per prompt
        {"policy": "streamingllm", "budget": 12},
        {"policy": "streamingllm", "budget": 8, "sinks": 0},
        {"policy": "snapkv", "budget": 8, "sinks": 4},  # sinks are StreamingLLM's
        {"kernel_size": 1},
        {"draft_tokens": 1},
        {"policy": "h2o", "scores": "policy", "head_budgets": "adaptive"},
        {"policy": "pyramidkv", "layer_budgets": "reference", "head_budgets": "adaptive"},
        {"policy": "snapkv", "layer_budgets": "reference"},  # layer_budgets are PyramidKV's
        {"head_budgets": ((8, MAX_ROWS), (64, 65))},
        {"head_budgets": ((12,),), "policy": "streamingllm"},
        {"head_budgets": ((64, 64),), "budget": 8},  # the table replaces the budget
        {"head_budgets": ((64,), (64, 64))},  # layers of a model may differ in their number of heads
        {"policy": Policy(), "scores": "both"},
        *({field: choice} for field, choices in CHOICES.items() for choice in choices),
    ],
    ids=str,
)
def test_good_settings(settings: dict[str, Any]) -> None:
    config = DGEConfig(**settings)
    for field, value in settings.items():
        assert getattr(config, field) == value
    assert DGEConfig.from_any(settings) == config
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


@pytest.mark.parametrize(
    "given, stored",
    [(np.int64(64), 64), (np.uint8(64), 64), (np.float32(0.5), 0.5), (np.float64(0.25), 0.25)],
    ids=repr,
)
def test_numpy_scalars_become_python_numbers(given: Any, stored: Any) -> None:
    config = DGEConfig(budget=given, window=np.int32(4))
    assert config.budget == stored and type(config.budget) is type(stored)
    assert type(config.window) is int


@pytest.mark.parametrize(
    "given",
    [[[64, 65], [66, 67]], np.array([[64, 65], [66, 67]]), [np.array([64, 65], np.uint8), (np.int16(66), 67)]],
    ids=["list", "array", "mixed"],
)
def test_head_budgets_become_tuples(given: Any) -> None:
    """So that settings can be compared, hashed and pickled, and do not change with the array."""
    config = DGEConfig(head_budgets=given)
    assert config.head_budgets == ((64, 65), (66, 67))
    assert all(type(n) is int for heads in config.head_budgets for n in heads)  # type: ignore[union-attr]
    assert config == DGEConfig(head_budgets=((64, 65), (66, 67))) and isinstance(hash(config), int)
    given[0][0] = 9
    assert config.head_budgets == ((64, 65), (66, 67))
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_message_of_a_table_is_short() -> None:
    """A table of a real model has hundreds of entries."""
    with pytest.raises(ValueError, match=r"^head_budgets") as caught:
        DGEConfig(head_budgets=[[64] * 8] * 31 + [[3] * 8])
    assert len(str(caught.value)) < 300


def test_defaults() -> None:
    assert dataclasses.asdict(DGEConfig()) == {
        "policy": "snapkv",
        "scores": "auto",
        "pooling": "max",
        "kernel_size": 7,
        "budget": 1024,
        "draft_tokens": 8,
        "window": 8,
        "sinks": 4,
        "layer_budgets": "exact",
        "head_budgets": "uniform",
        "new_turn": "restore",
        "park": "ram",
        "park_dir": None,
        "park_limit": None,
        "recall": 0,
        "recall_mass": 0.9,
        "recall_async": False,
        "elastic": True,
        "strict": True,
    }


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DGEConfig().budget = 5  # type: ignore[misc]


def test_from_any() -> None:
    config = DGEConfig(budget=99)
    assert DGEConfig.from_any(config) is config
    assert DGEConfig.from_any(True) == DGEConfig() == DGEConfig.from_any({})
    assert DGEConfig.from_any(None) is None
    assert DGEConfig.from_any(False) is None
    with pytest.raises(ValueError, match=r"^budget=0"):
        DGEConfig.from_any({"budget": 0})


@pytest.mark.parametrize("value", [1, 0, 1.0, ["budget"], object], ids=repr)
def test_from_another_type(value: Any) -> None:
    with pytest.raises(TypeError, match="must be True, False, None, the name of a preset, a dict or a DGEConfig"):
        DGEConfig.from_any(value)


def test_presets() -> None:
    paper = DGEConfig.preset("paper", budget=128)
    assert (paper.draft_tokens, paper.pooling, paper.scores, paper.recall) == (2, "none", "draft", 0)
    assert paper == dataclasses.replace(DGEConfig.preset("paper"), budget=128)
    assert DGEConfig.from_any("paper") == DGEConfig.preset("paper")
    assert DGEConfig.preset("recall") == DGEConfig(recall=4) == DGEConfig.from_any("recall")
    assert DGEConfig.preset("default") == DGEConfig()
    assert DGEConfig.preset("paper", draft_tokens=4).draft_tokens == 4  # what is given comes last


@pytest.mark.parametrize("make", [DGEConfig.preset, DGEConfig.from_any])
def test_unknown_preset(make: Any) -> None:
    with pytest.raises(ValueError, match=r'^preset="snapkv": must be "default", "paper", "recall"'):
        make("snapkv")


@pytest.mark.parametrize(
    "old, new",
    [
        ("draft_pooling", "pooling"),
        ("refresh", "recall"),
        ("refresh_mass", "recall_mass"),
        ("refresh_overlap", "recall_async"),
    ],
)
def test_old_names_give_the_new_one(old: str, new: str) -> None:
    for make in (
        DGEConfig,
        lambda **settings: DGEConfig.from_any(settings),
        lambda **s: DGEConfig.preset("paper", **s),
    ):
        with pytest.raises(TypeError, match=f"^{old} is called {new}$"):
            make(**{old: 1})


@pytest.mark.parametrize(
    "settings, ranks_by",
    [
        ({}, "draft"),
        ({"policy": "h2o"}, "policy"),
        ({"policy": "h2o", "recall": 4}, "draft"),
        ({"policy": "h2o", "scores": "both"}, "both"),
        ({"policy": Policy()}, "draft"),
    ],
    ids=str,
)
def test_what_auto_stands_for(settings: dict[str, Any], ranks_by: str) -> None:
    assert DGEConfig(**settings).ranks_by == ranks_by


@pytest.mark.parametrize(
    "field, text, value",
    [
        ("budget", "512", 512),
        ("budget", "0.25", 0.25),
        ("recall", "4", 4),
        ("recall", "auto", "auto"),
        ("park_limit", "1000", 1000),
        ("recall_mass", "1", 1.0),
        ("elastic", "false", False),
        ("window", "16", 16),
        ("park_dir", "12", "12"),
        ("policy", "h2o", "h2o"),
    ],
)
def test_parse(field: str, text: str, value: Any) -> None:
    parsed = DGEConfig.parse(field, text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize("field, text", [("budget", "x"), ("elastic", "yes"), ("window", "1.5"), ("park_limit", "1G")])
def test_text_that_is_no_value(field: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}={text}: must be "):
        DGEConfig.parse(field, text)


def test_every_setting_describes_an_option() -> None:
    for field in dataclasses.fields(DGEConfig):
        assert field.metadata["help"]
        choices = field.metadata["choices"]
        assert choices is None or field.default in choices, field.name


def test_the_library_states_the_ranges() -> None:
    assert RANGES["window"] == (1, MAX_ROWS) and RANGES["recall_mass"] == (0.0, 1.0)
    for field, (least, most) in RANGES.items():
        if field not in ("window", "kernel_size", "recall", "budget_share") and field not in CHOICES:
            for value in (least - 1, most + 1):
                with pytest.raises(ValueError, match=f"^{field}="):
                    DGEConfig(**{field: value})


@pytest.mark.parametrize("key", ["Budget", "parks", "recalls", "elastic_", "", 5], ids=repr)
def test_unknown_setting(key: Any) -> None:
    with pytest.raises(TypeError, match="unknown setting") as caught:
        DGEConfig.from_any({key: 1})
    assert repr(key) in str(caught.value)
    for field in dataclasses.fields(DGEConfig):
        assert field.name in str(caught.value)


@pytest.mark.parametrize("limit", [0, -1, 2**62, True, 1.5, "1G"], ids=repr)
def test_park_limit_is_a_number_of_bytes(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"^park_limit=.*must be a number of bytes"):
        DGEConfig(park_limit=limit)


def test_park_folder(tmp_path: Path) -> None:
    assert DGEConfig(park_dir="~/copies").park_dir == str(Path.home() / "copies")
    assert DGEConfig(park_dir=tmp_path).park_dir == str(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^park_dir=5: must be the path of a folder"):
        DGEConfig(park_dir=5)  # type: ignore[arg-type]


def test_there_is_a_host_copy_only_where_it_is_needed() -> None:
    assert DGEConfig(park="disk").parks == "disk"
    assert DGEConfig(park="disk", new_turn="append").parks == "off"
    assert DGEConfig(new_turn="reprefill").parks == "off"


@pytest.mark.parametrize("field", ["elastic", "recall_async", "strict"])
@pytest.mark.parametrize("value", [1, 0, None, "yes"], ids=repr)
def test_switches_are_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}=.*must be True or False"):
        DGEConfig(**{field: value})


@pytest.mark.parametrize("value", [-1, 1.5, True, "often", None], ids=repr)
def test_recall_is_tokens_or_auto(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^recall="):
        DGEConfig(recall=value)


@pytest.mark.parametrize("value", [0, 1.01, -0.5, float("nan"), True, "0.9"], ids=repr)
def test_recall_mass_is_a_share(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^recall_mass="):
        DGEConfig(recall="auto", recall_mass=value)


@pytest.mark.parametrize("park", ["disk", "off"])
def test_recall_reads_the_host_copy(park: str) -> None:
    with pytest.raises(ValueError, match=r'needs park="ram"'):
        DGEConfig(recall=4, park=park)
    assert DGEConfig(recall=4, new_turn="append").parks == "ram"


def test_recall_has_scores_of_its_own() -> None:
    with pytest.raises(ValueError, match=r'^scores="both": must be "auto" or "draft" with recall=4'):
        DGEConfig(recall=4, scores="both")
