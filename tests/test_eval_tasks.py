"""What the tasks of the evaluation ask."""

from __future__ import annotations

import json
import random
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from llama_dge._pieces import join, piece
from llama_dge.cli import main
from llama_dge.cli._common import load_vocabulary
from llama_dge.eval import longbench
from llama_dge.eval.documents import document_prompts
from llama_dge.eval.longbench import SETS, longbench_prompts
from llama_dge.eval.needle import KINDS, NeedleTask, needle_prompts
from llama_dge.eval.prompts import Prompt, Prompter, n_common
from llama_dge.eval.results import read_rows
from llama_dge.eval.texts import code_list, codes, facts, filler, haystack, numbers, sentences_of

if TYPE_CHECKING:
    from conftest import Zoo


@pytest.fixture
def prompter(zoo: Zoo) -> Prompter:
    return Prompter(load_vocabulary(zoo["g2"].path))


class Chat(Prompter):
    """A template, which the tiny models do not have."""

    def __init__(self, prompter: Prompter) -> None:
        self._model = prompter._model
        self.chat = True

    def tokens(self, text: str, chat: bool | None = None) -> list[int]:
        return self.plain(text if chat is False else f"<{text}>")


def words(text: str) -> int:
    return len(text.split())


def write_vocabulary(path: Path, texts: list[str]) -> Path:
    """Write a vocabulary of single bytes and some texts, without a model."""
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    types = gguf.TokenType
    kinds = [types.UNKNOWN, types.CONTROL, types.CONTROL] + [types.BYTE] * 256 + [types.USER_DEFINED] * len(texts)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *texts]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("make", [numbers, facts, codes])
def test_needles(make: Any) -> None:
    made = make(random.Random(1), 12)
    assert len({needle.opening for needle in made}) == len({needle.answer for needle in made}) == 12
    assert all(len(set(needle.questions)) == 3 for needle in made)
    assert all(needle.answer not in question for needle in made for question in needle.questions)
    assert made == make(random.Random(1), 12) != make(random.Random(2), 12)
    with pytest.raises(ValueError, match="there are"):
        make(random.Random(1), 10_000)


def test_haystack() -> None:
    needles = numbers(random.Random(1), 4)
    depths = [0.0, 0.25, 0.5, 1.0]
    stack = haystack(needles, depths, filler(random.Random(1)), 600, words)
    assert 580 <= words(stack.text) <= 600
    places = [words(stack.text[: stack.text.index(needle.sentence)]) / words(stack.text) for needle in needles]
    assert places == sorted(places)
    for place, depth, said in zip(places, depths, stack.depths):
        assert place == pytest.approx(depth, abs=0.05) and place == pytest.approx(said, abs=0.02)
    with pytest.raises(ValueError, match="do not fit into 20"):
        haystack(needles, depths, filler(random.Random(1)), 20, words)


def test_a_sentence_that_is_too_long_does_not_end_a_text() -> None:
    needles, long = numbers(random.Random(1), 1), "word " * 200
    prose = chain(["One two three four five."] * 30, [long], filler(random.Random(1)))
    assert 360 < words(haystack(needles, [0.5], prose, 400, words).text) <= 400
    # where all are, the text stays short
    assert words(haystack(needles, [0.5], repeat(long), 150, words).text) == words(needles[0].sentence)


def test_list_of_codes() -> None:
    stack = code_list(random.Random(1), 200, words)
    assert stack.text.count("\n") + 1 == len(stack.needles) and 190 <= words(stack.text) <= 200
    with pytest.raises(ValueError, match="not one code"):
        code_list(random.Random(1), 2, words)


def test_sentences_of_a_text() -> None:
    text = "The first sentence is here. Short. The second sentence\nis there! And this is the third of them?"
    got = list(islice(sentences_of(text, random.Random(1)), 4))
    assert got[0] == got[3] and set(got) == {
        "The first sentence is here.",
        "The second sentence is there!",
        "And this is the third of them?",
    }
    with pytest.raises(ValueError, match="no sentences"):
        next(sentences_of("", random.Random(1)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "together"])
def test_needle_prompts(prompter: Prompter, kind: str) -> None:
    task = NeedleTask(kinds=[kind], lengths=[1500], n_facts=3, seeds=[1, 2])
    groups = list(needle_prompts(task, Chat(prompter)))
    assert len(groups) == 2 and [len(group) for group in groups] == [3, 3]
    assert len({prompt.id for group in groups for prompt in group}) == 6
    for group in groups:
        shared = group[0].tokens[: group[0].shared]
        assert len(shared) > 1300 and all(prompt.tokens[: prompt.shared] == shared for prompt in group)
        for prompt in group:
            text = prompter._model.detokenize(list(prompt.tokens)).decode()
            assert 1380 <= len(prompt.tokens) <= 1620 and prompt.info["length"] == 1500
            assert text.rstrip(">").endswith("Answer in one full sentence.") and prompt.expected[0] in text
            assert text.index(prompt.expected[0]) / len(text) == pytest.approx(prompt.info["depth"], abs=0.05)
    # completion: the sentence is begun
    (prompt, *_), *_ = needle_prompts(task, prompter)
    assert prompter._model.detokenize(list(prompt.tokens)).decode().endswith(" is") or kind == "facts"


@pytest.mark.parametrize("n_facts", [2, 5, 7, 12])
def test_as_many_codes_are_asked_for_as_facts(prompter: Prompter, n_facts: int) -> None:
    (group,) = needle_prompts(NeedleTask(kinds=["codes"], lengths=[500], n_facts=n_facts), prompter)
    assert len(group) == n_facts and len({prompt.expected for prompt in group}) == n_facts
    depths = [prompt.info["depth"] for prompt in group]
    assert depths == sorted(depths) and depths[0] < 0.5 < depths[-1]


def test_questions_together(prompter: Prompter) -> None:
    task = NeedleTask(kinds=["together"], lengths=[1500], n_facts=3, seeds=[1, 2])
    groups = list(needle_prompts(task, Chat(prompter)))
    assert [len(group) for group in groups] == [1, 1]
    (first,), (second,) = groups
    assert first.id != second.id and len(first.expected) == len(set(first.expected)) == 3
    text = prompter._model.detokenize(list(first.tokens)).decode()
    document, questions = text.split("Answer 3 questions, each in one full sentence. ")
    assert questions.count("What is the secret number for") == 3
    assert all(document.count(answer) == 1 for answer in first.expected)
    assert not any(answer in questions for answer in first.expected)
    with pytest.raises(ValueError, match="together: asks questions, which needs a chat template"):
        next(needle_prompts(task, prompter))


def test_one_needle(prompter: Prompter) -> None:
    task = NeedleTask(lengths=[800, 1200], n_facts=1, depths=[0.0, 1.0])
    prompts = [prompt for group in needle_prompts(task, prompter) for prompt in group]
    assert [prompt.info["length"] for prompt in prompts] == [800, 800, 1200, 1200]
    assert prompts[0].info["depth"] < 0.05 and prompts[1].info["depth"] > 0.8
    with pytest.raises(ValueError, match="kind songs: must be one of"):
        next(needle_prompts(NeedleTask(kinds=["songs"]), prompter))


def test_prompter(prompter: Prompter) -> None:
    assert not prompter.chat
    with pytest.raises(ValueError, match="no chat template"):
        Prompter(prompter._model, "chat")
    with pytest.raises(ValueError, match='style="poem"'):
        Prompter(prompter._model, "poem")
    assert prompter.cut_middle("abcdefgh", 8) == "abcdefgh"
    assert prompter.cut_middle("abcdefgh", 5) == "abfgh"
    assert n_common([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2


def test_tokens_of_many_bytes_are_not_left_out(tmp_path: Path) -> None:
    """llama-cpp-python's own detokenize takes 32 bytes of a token at most, and none of a longer one."""
    long = ["-" * 32, "=" * 33, "#" * 100]
    model = load_vocabulary(write_vocabulary(tmp_path / "long.gguf", long))
    text = f"a{long[0]}b{long[1]}c{long[2]}d"
    tokens = model.tokenize(text.encode(), False, False)
    assert len(tokens) == 7 and join(model.vocab, tokens) == text.encode() != model.detokenize(tokens)
    assert piece(model.vocab, 1) == b"" and piece(model.vocab, 1, special=True) == b"<s>"
    assert Prompter(model).cut_middle(text, 6) == text[:34] + text[-102:]


def test_documents(prompter: Prompter) -> None:
    made = list(document_prompts({"a": "x" * 300, "b": "y" * 50}, ["Who?", "Where?"], prompter, max_prompt=100))
    assert len({prompt.id for prompt in made}) == 4
    assert [prompt.info["question"] for prompt in made] == ["Who?", "Where?"] * 2
    assert made[0].shared == made[1].shared and made[0].tokens[: made[0].shared] == made[1].tokens[: made[1].shared]
    assert 100 < len(made[0].tokens) < 120


OFFICIAL = {"context": "Passage 1: it was Bob.", "input": "Who was it?", "answers": ["Bob", "Bobby"], "_id": "q1"}
OURS = {"prompt": "Who?\n" + "z" * 400, "answers": "['one', 'two']", "all_classes": None, "index": 3}


def write(folder: Path, name: str, *entries: dict[str, Any]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def test_longbench_layouts(tmp_path: Path, prompter: Prompter) -> None:
    write(tmp_path, "hotpotqa", OFFICIAL, OURS)
    write(tmp_path, "trec", {**OFFICIAL, "all_classes": ["Bob", "Tom"]})
    a, b, c = longbench_prompts(tmp_path, Chat(prompter), max_prompt=200)
    text = prompter._model.detokenize(list(a.tokens)).decode()
    assert text.startswith("<Read these passages") and text.endswith(
        "Passage 1: it was Bob.\n\nQuestion: Who was it?\nAnswer:>"
    )
    assert (a.id, a.expected, a.set) == ("hotpotqa/q1", ("Bob", "Bobby"), "hotpotqa")
    assert (b.id, b.expected, len(b.tokens)) == ("hotpotqa/3", ("one", "two"), 200 + 3)  # < > and BOS
    assert not prompter._model.detokenize(list(c.tokens)).decode().startswith("<")  # trec has no template
    assert c.info["classes"] == ["Bob", "Tom"] and c.info["style"] == "completion" and a.info["style"] == "chat"
    assert len(longbench_prompts(tmp_path, prompter, max_prompt=200, limit=1)) == 2


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("42", ("42",)), (5, ("5",)), ("0", ("0",)), ('"yes"', ('"yes"',)), ("yes, no", ("yes, no",)), (None, ()),
        ("('a', 'b')", ("a", "b")), ([1, "b"], ("1", "b")),
    ],
)  # fmt: skip
def test_longbench_answers(tmp_path: Path, prompter: Prompter, answers: object, expected: tuple[str, ...]) -> None:
    # a line separator inside a text is no end of a line
    entry = {"prompt": None, "context": "a\u2028b\u0085c", "input": None, "answers": answers}
    path = tmp_path / "hotpotqa.jsonl"
    path.write_text(json.dumps(entry, ensure_ascii=False) + "\n", encoding="utf-8")
    (prompt,) = longbench_prompts(tmp_path, prompter, max_prompt=300)
    assert prompt.expected == expected
    assert "Question: \nAnswer:" in prompter._model.detokenize(list(prompt.tokens)).decode()


def test_longbench_rules() -> None:
    assert len(SETS) == 16
    assert {name for name, rule in SETS.items() if not rule.chat} == {
        "trec", "triviaqa", "samsum", "lcc", "repobench-p",
    }  # fmt: skip
    assert {name for name, rule in SETS.items() if rule.first_line} == {"trec", "triviaqa", "samsum"}

    def prompt(name: str, *expected: str) -> Prompt:
        return Prompt("longbench", name, "1", (1,), expected, {"classes": ["Bob", "Tom"]})

    assert longbench.score("Bob\nTom", prompt("trec", "Bob")) == 1.0
    assert longbench.score("\nBob\nTom", prompt("triviaqa", "Bob")) == 1.0
    assert longbench.score("Bob\nTom", prompt("hotpotqa", "Bob")) == pytest.approx(2 / 3)
    assert longbench.score("Bobby", prompt("hotpotqa", "Bob", "Bobby")) == 1.0
    assert longbench.score("3", prompt("passage_retrieval_en", "Paragraph 3")) == 1.0
    assert longbench.max_tokens(prompt("gov_report")) == 512
    # a limit of the user shortens long answers and makes no short one longer
    assert [longbench.max_tokens(prompt(name), 128) for name in ("gov_report", "triviaqa")] == [128, 32]
    assert longbench.stop(prompt("hotpotqa")) is None
    stop = longbench.stop(prompt("samsum"))
    assert stop is not None and stop(b"\nline\n") and not stop(b"\nline")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("qasper", "nonsense\n", "qasper.jsonl, line 1"),
        ("qasper", '{"answers": []}\n', 'needs "answers", and "prompt" or "context"'),
        ("other", "", "no file of a set of LongBench"),
        ("qasper", "", r"qasper\.jsonl is empty"),
        ("qasper", '{"answers": [], "prompt": null, "context": null}\n', 'needs "answers", and "prompt" or "context"'),
        ("qasper", '{"answers": [], "prompt": 12}\n', "must be texts"),
        ("qasper", '{"answers": [], "context": ["a"]}\n', "must be texts"),
        ("qasper", b'{"answers": [], "prompt": "\xff"}\n', "qasper.jsonl, line 1"),
    ],
)
def test_longbench_errors(tmp_path: Path, prompter: Prompter, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / f"{name}.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        longbench_prompts(tmp_path, prompter, max_prompt=100)


def test_longbench_command(
    tmp_path: Path, zoo: Zoo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path, "hotpotqa", OFFICIAL, OURS)
    write(tmp_path, "triviaqa", OURS)
    out = str(tmp_path / "out.jsonl")
    args = ["eval", "longbench", str(zoo["g2"].path), "--data", str(tmp_path), "--out", out, "--max-tokens", "5"]
    assert main([*args, "--arms", "full", "paper:budget=32", "--threads", "1"]) == 0
    assert len(list(read_rows(Path(out)))) == 6
    assert main([*args[:4], str(tmp_path / "none"), *args[5:]]) == 1
    assert "no file of a set" in capsys.readouterr().err
    assert main(["eval", "summary", out]) == 0
    assert "| full | " in capsys.readouterr().out


def test_kld_command(tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("x y z " * 40)
    out = tmp_path / "out.jsonl"
    args = ["eval", "kld", str(zoo["g2"].path), "-f", str(tmp_path / "a.txt"), "-p", "Who?", "Where?", "--quick"]
    assert main([*args, "--arms", "full", "paper:budget=32", "--threads", "1", "--out", str(out)]) == 0
    rows = list(read_rows(out))
    assert [row["arm"] for row in rows] == ["full", "paper:budget=32"] * 2
    assert all(row["score"] is None for row in rows)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--arms", "snapkv:depth=1"], 'no setting "depth"'),
        (["--style", "chat"], "no chat template"),
        (["--facts", "30"], "30 secret numbers"),
        (["--text", "/nonexistent"], "cannot read /nonexistent"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, zoo: Zoo, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert main(["eval", "needle", str(zoo["g2"].path), "--out", str(tmp_path / "out.jsonl"), *args]) == 1
    assert message in capsys.readouterr().err
