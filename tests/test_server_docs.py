"""docs/server.md says what the code does: fields, bounds, settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from llama_dge.server import bounds
from llama_dge.server.request_models import ChatRequest, CompletionRequest, EmbeddingRequest
from llama_dge.server.settings import ModelSettings, ServerSettings

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "server.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")
    ]


def test_fields() -> None:
    rows = table("Fields")
    names = [row[0].strip("`") for row in rows]
    assert names == sorted(names)
    for column, model in enumerate((ChatRequest, CompletionRequest, EmbeddingRequest), 1):
        served = {name for name, row in zip(names, rows) if row[column] == "served"}
        ignored = {name for name, row in zip(names, rows) if row[column] == "ignored"}
        refused = {name for name, row in zip(names, rows) if row[column] == "refused"}
        assert served == set(model.model_fields)
        assert ignored == set(model.ignored) and refused == set(model.refused)


def test_bounds() -> None:
    section = PAGE.split("\n## Bounds\n")[1].split("\n## ")[0]
    stated = {
        int(number) for line in section.splitlines() if line.startswith("| ") for number in re.findall(r"\d+", line)
    }
    values = {name: value for name, value in vars(bounds).items() if name.isupper() and isinstance(value, int)}
    assert len(values) > 12
    missing = {name for name, value in values.items() if value not in stated and value != 64 * 2**20}
    assert not missing and bounds.BODY_BYTES == 64 * 2**20
    for name in bounds.SERVER_ONLY:
        assert f"`{name}`" in section


def test_settings() -> None:
    fields = {**ServerSettings.model_fields, **ModelSettings.model_fields}
    for name, default, _ in table("Settings"):
        value = fields[name.strip("`")].default
        assert default.strip("`") == str(value).lower(), name
