"""The command where stdout cannot take what is written: another encoding, or a reader that is gone."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import llama_dge
from llama_dge.demo_text import chronicle
from reference.models import N_SPECIAL, ZOO, make_weights, write_gguf
from test_plot import needle_rows

ENCODINGS = ("ascii", "cp1252")
# commands run in folders of their own, where a relative path to the package leads nowhere
ENV = {**os.environ, "PYTHONPATH": str(Path(llama_dge.__file__).parents[1])}
ENV.pop("PYTHONUNBUFFERED", None)  # what is written must wait in a buffer, as it does for users
NAME = "caf\u00e9 \u65e5\u672c"  # of files, models and questions


def write_model(path: Path, loud: list[int]) -> Path:
    """Write a model whose answers are mostly of some tokens."""
    weights = make_weights(ZOO["g2"])
    gain = np.full((len(weights.output), 1), 0.1, np.float32)
    gain[loud] = 30.0
    return write_gguf(dataclasses.replace(weights, output=weights.output * gain), path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that answer with bytes, which make characters or do not, and with a word that no encoding here has."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "bytes.gguf", [N_SPECIAL + byte for byte in "\u00e9\u00e4\u00f6\u00e0\u00ea\u00fc".encode()])
    token = N_SPECIAL + 1
    add = gguf.GGUFWriter.add_token_list, gguf.GGUFWriter.add_token_types

    def tokens(self: Any, texts: list[bytes]) -> None:
        add[0](self, [*texts[:token], "\u65e5\u672c".encode(), *texts[token + 1 :]])

    def types(self: Any, kinds: list[int]) -> None:
        add[1](self, [*kinds[:token], int(gguf.TokenType.NORMAL), *kinds[token + 1 :]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_token_list", tokens)
        patch.setattr(gguf.GGUFWriter, "add_token_types", types)
        write_model(folder / "word.gguf", [token])
    return folder


@pytest.fixture
def folder(tmp_path: Path, models: Path) -> Path:
    (tmp_path / f"{NAME}.txt").write_text(f"{NAME}. {chronicle(1)[:400]}", encoding="utf-8")
    (tmp_path / f"{NAME}.gguf").symlink_to(models / "bytes.gguf")
    (tmp_path / "word.gguf").symlink_to(models / "word.gguf")
    rows = [{**row, "model": f"{NAME}.gguf"} for row in needle_rows(["full", "paper:budget=64"])]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / f"{NAME}.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "models.toml").write_text(
        f"[m]\nfile = 'm.gguf'\npackage = 'p'\nversion = '1'\nparts = 1\nmember = 'm'\nsize = 1\n"
        f"sha256 = '0'\narchitecture = 'llama'\ncontext = 1\nlicence = '{NAME}'\n",
        encoding="utf-8",
    )
    return tmp_path


def run(folder: Path, command: str, encoding: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run a command of which NAME is a placeholder, with pipes in place of a terminal."""
    env = {**ENV, "PYTHONIOENCODING": encoding, "XDG_CACHE_HOME": str(folder)}
    args = [part.replace("NAME", NAME) for part in command.split()]
    done = subprocess.run(
        [sys.executable, "-m", "llama_dge", *args], cwd=folder, env=env, input=stdin, capture_output=True, check=False
    )
    return done.returncode, done.stdout.decode(encoding), done.stderr.decode(encoding)


RUN = "run NAME.gguf -f NAME.txt --budget 64 -n 40 --temp 1.5 -t 1"


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "command",
    [
        RUN,
        "chat word.gguf -f NAME.txt --budget 64 -n 40 --temp 1.5 -t 1 -p NAME -p /stats",
        "compare NAME.gguf -f NAME.txt --budget 64 -n 20 -t 1",
        "inspect NAME.gguf -f NAME.txt --budget 64 -n 12 -t 1 -o NAME.html --json",
        "doctor NAME.gguf",
        "eval kld NAME.gguf -f NAME.txt -n 4 --arms full paper --budgets 32 -t 1 --out out-NAME.jsonl",
        "eval summary NAME.jsonl",
        "plot NAME.jsonl -o NAME",
        "models list --manifest models.toml",
    ],
)
def test_characters_that_an_encoding_lacks_are_replaced(folder: Path, command: str, encoding: str) -> None:
    if command.startswith("plot"):
        pytest.importorskip("matplotlib")
    status, out, err = run(folder, command, encoding)
    assert status == 0 and "Traceback" not in err, err
    whole = run(folder, command.replace("out-NAME", "again-NAME"), "utf-8")[1]

    def same(text: str) -> str:
        # speeds and seconds differ; what an encoding lacks is a question mark
        text = re.sub(r"again-|out-", "", re.sub(r" *[\d,.]+", "0", text))
        return text.encode(encoding, "replace").decode(encoding)

    if command.startswith("inspect"):  # its JSON is ASCII
        assert json.loads(out)["answer"] == json.loads(whole)["answer"]
    else:
        assert not whole.isascii() and same(out) == same(whole)


def test_an_answer_is_whole_where_a_character_is_split(folder: Path) -> None:
    """Each token is a byte, and each is written at once."""
    _, whole, _ = run(folder, RUN, "utf-8")
    assert re.search("[\u00c0-\u00ff]", whole) and "\ufffd" in whole
    for encoding in ENCODINGS:
        status, out, err = run(folder, RUN, encoding)
        assert status == 0 and "entries kept" in err
        assert out == whole.encode(encoding, "replace").decode(encoding)


def test_questions_that_are_not_in_the_encoding_of_stdin(folder: Path) -> None:
    status, out, err = run(
        folder, "chat NAME.gguf --full -n 4 -t 1", "ascii", f"{NAME}\n/stats\n".encode()
    )  # fmt: skip
    assert status == 0 and "Traceback" not in err and "prompt" in out


def test_errors_are_shown_in_any_encoding(folder: Path) -> None:
    status, _, err = run(folder, "run NAME-none.gguf -p q", "ascii")
    assert status == 1 and err.startswith("llama-dge run: error: caf") and err.count("\n") == 1


def piped(folder: Path, command: str, redirect: str = "") -> tuple[int, str]:
    """Run a command whose reader is gone before it has loaded its libraries. Returns its status, and stderr."""
    pipe = f'"{sys.executable}" -m llama_dge {command.replace("NAME", NAME)} {redirect} | true'
    script = f'{pipe}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=ENV, capture_output=True, check=False)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    "command",
    [
        "--version",
        "run --help",
        "models list",
        "doctor",
        "estimate 'NAME.gguf' -c 512",
        "eval summary 'NAME.jsonl'",
        "inspect 'NAME.gguf' -f 'NAME.txt' --budget 64 -n 12 -t 1 --json",
        "run 'NAME.gguf' -f 'NAME.txt' --budget 64 -n 12 -t 1",
        "chat 'NAME.gguf' -f 'NAME.txt' -n 12 -t 1 -p Who -p Where",
    ],
)
def test_a_reader_that_goes_away_ends_a_command_quietly(folder: Path, command: str) -> None:
    status, err = piped(folder, command)
    assert status == 1 and not re.search("Traceback|Exception ignored|Broken pipe|error", err), err


def test_a_reader_of_both_streams_goes_away(folder: Path) -> None:
    assert piped(folder, "run 'NAME.gguf' -f 'NAME.txt' -n 12 -t 1 -v", redirect="2>&1") == (1, "")


def test_the_first_lines_are_there(folder: Path) -> None:
    line = f'"{sys.executable}" -m llama_dge eval summary *.jsonl | head -n 1'
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=ENV, capture_output=True, check=False)
    assert done.stdout == b"## needle\n" and done.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_an_error(folder: Path) -> None:
    for command in ("models list", "eval summary NAME.jsonl"):
        args = [sys.executable, "-m", "llama_dge", *command.replace("NAME", NAME).split(maxsplit=2)]
        with open("/dev/full", "wb") as full:
            done = subprocess.run(args, cwd=folder, env=ENV, stdout=full, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 1
        assert re.fullmatch(r"llama-dge: error: .*No space left on device\n", done.stderr.decode())


@pytest.mark.parametrize(
    "command, name",
    [
        ("run NAME.gguf -f empty.txt -p Who", "empty.txt"),
        ("run NAME.gguf -f - -p Who", "stdin"),
        ("chat NAME.gguf -f empty.txt -p Who", "empty.txt"),
        ("inspect NAME.gguf -f empty.txt --json", "empty.txt"),
        ("compare NAME.gguf -f empty.txt -p Who", "empty.txt"),
        ("eval kld NAME.gguf -f empty.txt --out out.jsonl", "empty.txt"),
        ("eval needle NAME.gguf --text empty.txt --out out.jsonl", "empty.txt"),
        ("eval longbench NAME.gguf --data . --out out.jsonl", "qasper.jsonl"),
        ("eval summary empty.txt", "empty.txt"),
        ("plot empty.txt -o figures", "empty.txt"),
        ("run empty.txt -p Who", "empty.txt"),
        ("models list --manifest empty.txt", "empty.txt"),
    ],
)
def test_an_empty_file_is_an_error_that_names_it(folder: Path, command: str, name: str) -> None:
    (folder / "empty.txt").touch()
    (folder / "qasper.jsonl").touch()
    status, out, err = run(folder, command, "utf-8")
    assert (status, out) == (1, "") and name in err and err.count("\n") == 1, err
