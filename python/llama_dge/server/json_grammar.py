"""GBNF of JSON schemas, for answers and for the arguments of tools.

Enforced: types, properties and their order, `required`, `additionalProperties`, `items`, `prefixItems`, numbers of
items, lengths of strings, `enum`, `const`, `anyOf`, `oneOf`, `allOf` of objects, references within the schema,
`minimum` from 0 on, and the formats date, time, date-time and uuid. The rest, such as `pattern`, is left to the client.
"""

from __future__ import annotations

import json
from typing import Any

from . import bounds

_WS = '(" " | "\\n" [ \\t]{0,20})?'
_CHAR = r'[^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})'
_DATE = '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
_ZONE = '("Z" | [+-] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
_TIME = f'([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{{1,9}})? {_ZONE}'
#: Rules that others are built of, each with what it needs.
_RULES = {
    "ws": (_WS, ()),
    "char": (_CHAR, ()),
    "string": ('"\\"" char* "\\""', ("char",)),
    "natural": ('"0" | [1-9] [0-9]{0,15}', ()),
    "integer": ('"-"? natural', ("natural",)),
    "number": ('"-"? natural ("." [0-9]{1,16})? ([eE] [+-]? [0-9]{1,3})?', ("natural",)),
    "boolean": ('"true" | "false"', ()),
    "null": ('"null"', ()),
    "value": ("object | array | string | number | boolean | null",
              ("object", "array", "string", "number", "boolean", "null")),
    "object": ('"{" ws (member ("," ws member)*)? "}"', ("ws", "member")),
    "member": ('string ws ":" ws value ws', ("ws", "string", "value")),
    "array": ('"[" ws (value ws ("," ws value ws)*)? "]"', ("ws", "value")),
    "date": (_DATE, ()),
    "time": (_TIME, ()),
    "format-date": ('"\\"" date "\\""', ("date",)),
    "format-time": ('"\\"" time "\\""', ("time",)),
    "format-date-time": ('"\\"" date "T" time "\\""', ("date", "time")),
    "format-uuid": ('"\\"" [0-9a-f]{8} ("-" [0-9a-f]{4}){3} "-" [0-9a-f]{12} "\\""', ()),
}  # fmt: skip
#: Keywords that restrict nothing.
_NOTES = ("title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "$defs",
          "definitions", "deprecated", "readOnly", "writeOnly", "strict", "discriminator")  # fmt: skip


class SchemaError(ValueError):
    """A schema that has no grammar."""


def literal(text: str) -> str:
    """Return a text as GBNF writes it."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return (
        '"' + "".join(escapes.get(char, char if char.isprintable() else f"\\U{ord(char):08X}") for char in text) + '"'
    )


class Grammar:
    """Collects rules; `text` is the whole."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._refs: dict[tuple[int, str], str] = {}
        self._n = 0

    def text(self, root: str) -> str:
        """Return the grammar of a root expression; raises SchemaError where it is too long."""
        rules = {"root": root, **self._rules}
        text = "\n".join(f"{name} ::= {rule}" for name, rule in rules.items())
        if len(text) > bounds.GRAMMAR_LENGTH:
            raise SchemaError(f"its grammar has {len(text)} characters, and may have {bounds.GRAMMAR_LENGTH}")
        return text

    def rule(self, expression: str) -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self._rules)}"
        while name in self._rules:
            name += "x"
        self._rules[name] = expression
        return name

    def basic(self, name: str) -> str:
        """Add one of the rules that are always the same, and what it needs."""
        if name not in self._rules:
            self._rules[name], needed = _RULES[name]
            for other in needed:
                self.basic(other)
        return name

    def schema(self, schema: Any) -> str:
        """Add the rules of a schema; returns the name of one, and raises SchemaError."""
        return self._visit(schema, schema, 0)

    def _visit(self, schema: Any, whole: Any, depth: int) -> str:
        self._n += 1
        if depth > bounds.SCHEMA_DEPTH:
            raise SchemaError(f"values are nested deeper than {bounds.SCHEMA_DEPTH}")
        if self._n > bounds.SCHEMA_NODES:
            raise SchemaError(f"it has more than {bounds.SCHEMA_NODES} values")
        if schema is True:
            return self.basic("value")
        if not isinstance(schema, dict):
            raise SchemaError(f"{json.dumps(schema, default=str)[:80]} is no schema: it must be an object")
        if "$ref" in schema:
            return self._reference(schema["$ref"], whole, depth)
        schema = {key: value for key, value in schema.items() if key not in _NOTES}
        for key in ("anyOf", "oneOf"):
            if key in schema:
                rest = {name: value for name, value in schema.items() if name != key}
                return self._union([_merged(rest, item) for item in _list(schema, key)], whole, depth)
        if "allOf" in schema:
            rest = {name: value for name, value in schema.items() if name != "allOf"}
            for item in _list(schema, "allOf"):
                rest = _merged(rest, self._target(item["$ref"], whole) if "$ref" in item else item)
            return self._visit(rest, whole, depth + 1)
        if "const" in schema:
            return self.rule(_constant(schema["const"]))
        if "enum" in schema:
            return self.rule(" | ".join(_constant(value) for value in _list(schema, "enum")))
        if isinstance(schema.get("type"), list):
            return self._union([{**schema, "type": kind} for kind in _list(schema, "type")], whole, depth)
        return self._typed(schema, whole, depth)

    def _typed(self, schema: dict[str, Any], whole: Any, depth: int) -> str:
        kind = schema.get("type")
        if kind == "object" or (kind is None and ("properties" in schema or "additionalProperties" in schema)):
            return self._object(schema, whole, depth)
        if kind == "array" or (kind is None and ("items" in schema or "prefixItems" in schema)):
            return self._array(schema, whole, depth)
        if kind == "string":
            if f"format-{schema.get('format')}" in _RULES:
                return self.basic(f"format-{schema['format']}")
            if "minLength" in schema or "maxLength" in schema:
                self.basic("char")
                return self.rule(f'"\\"" char{_times(schema, "minLength", "maxLength")} "\\""')
            return self.basic("string")
        if kind == "integer" and isinstance(least := schema.get("minimum"), (int, float)) and least >= 0:
            return self.basic("natural")
        if kind in ("integer", "number", "boolean", "null"):
            return self.basic(kind)
        if kind is None:
            return self.basic("value")
        raise SchemaError(f"type {kind!r} is not known")

    def _union(self, schemas: list[Any], whole: Any, depth: int) -> str:
        return self.rule(" | ".join(self._visit(item, whole, depth + 1) for item in schemas))

    def _target(self, ref: Any, whole: Any) -> Any:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise SchemaError(f"$ref {ref!r}: must begin with #; nothing is fetched")
        target = whole
        for part in ref[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or key not in target:
                raise SchemaError(f"$ref {ref!r}: there is no {key!r}")
            target = target[key]
        return target

    def _reference(self, ref: Any, whole: Any, depth: int) -> str:
        target = self._target(ref, whole)
        key = (id(whole), str(ref))
        if key not in self._refs:
            name = self._refs[key] = self.rule("")  # first: the schema may refer to itself
            self._rules[name] = self._visit(target, whole, depth + 1)
            if self._rules[name] == name:
                raise SchemaError(f"$ref {ref!r}: refers to itself")
        return self._refs[key]

    def _object(self, schema: dict[str, Any], whole: Any, depth: int) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise SchemaError("properties must be an object, and required a list")
        more = schema.get("additionalProperties", "properties" not in schema)
        self.basic("ws")
        first: str | None = None  # what may follow where no property is written yet
        rest: str | None = None  # ... and where one is
        if more is not False:
            value = self._visit(True if more is True else more, whole, depth + 1)
            member = self.rule(f'{self.basic("string")} ws ":" ws {value} ws')
            rest = self.rule(f'("," ws {member})*')
            first = self.rule(f"({member} {rest})?")
        for name, item in reversed(list(properties.items())):
            value = self._visit(item, whole, depth + 1)
            member = self.rule(f'{_constant(name)} ws ":" ws {value} ws')
            then = f" {rest}" if rest else ""
            if name in required:
                first = self.rule(member + then)
                rest = self.rule(f'"," ws {member}{then}')
            else:
                first = self.rule(f"({member}{then})?" if first is None else f"{member}{then} | {first}")
                rest = self.rule(f'("," ws {member})?{then}')
        return self.rule(f'"{{" ws {first} "}}"' if first else '"{" ws "}"')

    def _array(self, schema: dict[str, Any], whole: Any, depth: int) -> str:
        self.basic("ws")
        fixed = schema.get("prefixItems", schema["items"] if isinstance(schema.get("items"), list) else None)
        if fixed is not None:
            items = [self._visit(item, whole, depth + 1) for item in fixed]
            return self.rule('"[" ws ' + ' ws "," ws '.join(items) + ' ws "]"')
        item = self._visit(schema.get("items", True), whole, depth + 1)
        least, most = _range(schema, "minItems", "maxItems")
        if most == 0:
            return self.rule('"[" ws "]"')
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = f'{item} ws ("," ws {item} ws){more}'
        return self.rule(f'"[" ws {some} "]"' if least else f'"[" ws ({some})? "]"')


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema[key]
    if not isinstance(value, list) or not value:
        raise SchemaError(f"{key}: must be a list that is not empty")
    if key in ("anyOf", "oneOf", "allOf") and not all(isinstance(item, dict) for item in value):
        raise SchemaError(f"{key}: must be a list of objects")
    return value


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Join two schemas that both have to hold, as far as objects go."""
    if not one or "$ref" in other:
        return other
    merged = {**one, **other}
    if "properties" in one and "properties" in other:
        merged["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        merged["required"] = [*one["required"], *other["required"]]
    return merged


def _constant(value: Any) -> str:
    return literal(json.dumps(value, ensure_ascii=False))


def _range(schema: dict[str, Any], low: str, high: str) -> tuple[int, int | None]:
    values = []
    for key in (low, high):
        value = schema.get(key)
        if value is not None and (not isinstance(value, int) or not 0 <= value <= bounds.SCHEMA_REPEATS):
            raise SchemaError(f"{key} is {value!r}, and must be in 0 .. {bounds.SCHEMA_REPEATS}")
        values.append(value)
    least = values[0] or 0
    if values[1] is not None and values[1] < least:
        raise SchemaError(f"{high} is {values[1]}, which is less than {low}")
    return least, values[1]


def _times(schema: dict[str, Any], low: str, high: str) -> str:
    least, most = _range(schema, low, high)
    return f"{{{least},{'' if most is None else most}}}"


def schema_grammar(schema: Any) -> str:
    """Return the grammar of a JSON schema; raises SchemaError."""
    grammar = Grammar()
    try:
        return grammar.text(grammar.schema(schema))
    except (TypeError, AttributeError, KeyError) as error:
        raise SchemaError(f"it is no JSON schema: {error}") from error


#: Any JSON object.
JSON_OBJECT = {"type": "object"}
