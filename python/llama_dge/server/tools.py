"""Calls of tools: how models write them, grammars that make them do so, and parsers for what they write."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import bounds
from .json_grammar import Grammar, SchemaError, literal
from .request_models import Function


@dataclass(frozen=True)
class Format:
    """How a family of models writes a call.

    Parameters
    ----------
    name
        Of the family.
    begin, end
        Text before and after one call, or before and after all of them where `is_list`. Without `begin` an answer that
        is one JSON object is a call.
    arguments
        Key of the arguments in the JSON of a call; None: the name is a heading above the arguments, ``{name}:``.
    is_list
        Whether all calls are items of one JSON list.
    """

    name: str
    begin: str = ""
    end: str = ""
    arguments: str | None = "arguments"
    is_list: bool = False


HERMES = Format("hermes", "<tool_call>", "</tool_call>")
MISTRAL = Format("mistral", "[TOOL_CALLS]", "", is_list=True)
JSON = Format("json", arguments="parameters")
HEADING = Format("heading", "functions.", "", arguments=None)
_HEADING = "message:\n"  # of an answer that calls nothing
_PYTHON = "<|python_tag|>"  # Llama writes it before some calls


def format_of(template: str) -> Format | None:
    """Return how a chat template has calls written; None for a template without tools."""
    if not re.search(r"\btools\b", template):
        return None
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return JSON


@dataclass(frozen=True)
class Call:
    """A call of a function, with its arguments as JSON."""

    name: str
    arguments: str
    id: str = ""


def new_id(form: Format | None) -> str:
    """Return an id for a call. Templates of Mistral's models insist on nine characters."""
    alphabet = string.ascii_letters + string.digits
    n = 9 if form is MISTRAL else 24
    return ("" if form is MISTRAL else "call_") + "".join(secrets.choice(alphabet) for _ in range(n))


def call_grammar(form: Format | None, functions: Sequence[Function], several: bool) -> str:
    """Return a grammar of calls of some functions.

    Parameters
    ----------
    form
        None: the answer is the arguments of the one function.
    functions
        Those that may be called.
    several
        Whether more than one call may be made.

    Raises
    ------
    SchemaError
        The parameters of a function have no grammar.
    """
    grammar = Grammar()
    bodies = []
    for function in functions:
        try:
            arguments = grammar.schema(function.parameters)
        except (SchemaError, TypeError, AttributeError, KeyError) as error:
            raise SchemaError(f"the parameters of {function.name!r}: {error}") from error
        ws = grammar.basic("ws")
        if form is None:
            return grammar.text(arguments)
        if form.arguments is None:
            bodies.append(f"{literal(function.name + ':')} ws {arguments}")
            continue
        name = literal(json.dumps(function.name, ensure_ascii=False))
        key = literal(json.dumps(form.arguments) + ":")
        bodies.append(f'"{{" {ws} "\\"name\\":" ws {name} ws "," ws {key} ws {arguments} ws "}}"')
    assert form is not None
    body = grammar.rule(" | ".join(bodies))
    more = f"{{0,{bounds.ANSWERS - 1}}}" if several else "{0}"
    if form.is_list:
        inner = f'{body} ("," ws {body}){more}' if several else body
        return grammar.text(f'{literal(form.begin + "[")} {inner} "]"')
    end = f'"\\n" {literal(form.end)}' if form.end else ""
    begin = literal(form.begin + ("\n" if form.end else "")) if form.begin else ""
    call = grammar.rule(f"{begin} {body} {end}".strip())
    return grammar.text(f'{call} ("\\n" {call}){more}' if several and form is not JSON else call)


class Parser:
    """Parts an answer into text and calls, while it is written.

    Text that may be the beginning of a call is held back until it is known; a call comes out when it is complete.

    Parameters
    ----------
    form
        How the model writes a call; None: the whole answer is the arguments of the one function.
    names
        Functions that can be called.
    """

    def __init__(self, form: Format | None, names: Sequence[str]) -> None:
        self._form = form
        self._names = tuple(names)
        self._held = ""
        self.n_calls = 0

    def feed(self, text: str) -> Iterator[str | Call]:
        """Take more of the answer; yields text and calls that are complete. White space before a call is left out."""
        self._held += text
        form = self._form
        if form is None:
            return
        if not form.begin:  # the whole answer is a call, or none of it
            start = self._held.lstrip()
            if start and not start.startswith(("{", _PYTHON)) and not _PYTHON.startswith(start):
                yield self._pop(len(self._held))
            return
        if form.arguments is None and not self.n_calls:
            if _HEADING.startswith(self._held):
                return
            self._held = self._held.removeprefix(_HEADING)
        while True:
            at = self._held.find(form.begin)
            n = next((n for n in range(len(form.begin) - 1, 0, -1) if self._held.endswith(form.begin[:n])), 0)
            before = self._held[: at if at >= 0 else len(self._held) - n].rstrip()
            if before:
                yield self._pop(len(before))
            end = self._held.find(form.end) if form.end and at >= 0 else -1
            if end < 0:
                return
            whole = self._pop(end + len(form.end))
            yield from self._calls(whole.lstrip()[len(form.begin) : -len(form.end)], whole)

    def end(self) -> Iterator[str | Call]:
        """Yield what was held back."""
        text, self._held = self._held, ""
        form, start = self._form, text.lstrip()
        if form is None:
            self.n_calls += 1
            yield Call(self._names[0], text, new_id(form))
        elif form.arguments is None and start.startswith(form.begin):
            yield from self._headed(start, text)
        elif form.is_list and start.startswith(form.begin):
            yield from self._calls(start[len(form.begin) :], text)
        elif not form.begin and start:
            yield from self._calls(start.removeprefix(_PYTHON), text)
        elif start or (text and not self.n_calls):
            yield text

    def _pop(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text

    def _calls(self, body: str, whole: str) -> Iterator[str | Call]:
        """Yield the calls that a text holds, or the text where it holds none."""
        calls = self._of_json(body)
        if not calls:
            yield whole
        for call in calls:
            self.n_calls += 1
            yield call

    def _of_json(self, body: str) -> list[Call]:
        named = re.match(r"\s*([\w.-]+)(?:\[ARGS\])?\s*(\{.*\})\s*$", body, re.DOTALL)
        text = json.dumps({"name": named.group(1)})[:-1] + f', "arguments": {named.group(2)}}}' if named else body
        try:
            value = json.loads(text)
        except ValueError:
            return []
        calls = []
        for item in value if isinstance(value, list) else [value]:
            arguments = item.get("arguments", item.get("parameters")) if isinstance(item, dict) else None
            if arguments is None or item.get("name") not in self._names:
                return []
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(item["name"], arguments, new_id(self._form)))
        return calls

    def _headed(self, text: str, whole: str) -> Iterator[str | Call]:
        found = re.findall(r"^functions\.([^\n:]+):\s*(\{.*?\})\s*(?=^functions\.|\Z)", text, re.DOTALL | re.MULTILINE)
        calls = [Call(name, arguments, new_id(self._form)) for name, arguments in found if name in self._names]
        self.n_calls += len(calls)
        yield from calls
        if not calls:
            yield whole
