"""The notations of a call's arguments: JSON, elements with raw values, Gemma's and Python's.

Each reads arguments while they arrive, and has the rules of a Lark grammar for the arguments that a schema allows.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from attn_openai.schemas import OPTIONS

TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip
ANY_TYPE = frozenset(TYPES)
WORDS = {"True": "true", "False": "false", "None": "null"}
"""Values that some templates write as Python does."""
MAX_DEPTH = 64


class Piece(NamedTuple):
    """What was read of arguments: JSON text to pass on, the number of characters read, and whether they have ended."""

    text: str
    length: int
    done: bool


Schema = Mapping[str, Any]


def resolved(schema: Any, root: Schema) -> Schema:
    """A schema, or the one in `root` that its $ref names."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for key in reference[2:].split("/"):
            schema = schema.get(key.replace("~1", "/").replace("~0", "~"), {}) if isinstance(schema, Mapping) else {}
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: Schema, depth: int = 0) -> frozenset[str]:
    """The JSON types of the values that a schema allows; all if it does not say."""
    schema = resolved(schema, root)
    given = schema.get("type")
    if isinstance(given, str | list):
        return frozenset([given] if isinstance(given, str) else map(str, given)) & ANY_TYPE
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(kind for kind in TYPES for value in values if of_type(value, kind))
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list) and depth < MAX_DEPTH:
        return frozenset().union(*(types_of(option, root, depth + 1) for option in options))
    return ANY_TYPE


def of_type(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a JSON type."""
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def strict_json(text: str) -> Any:
    """A JSON value; raises `ValueError` for anything else, NaN included."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def json_of(text: str, schema: Any, root: Schema) -> str:
    """A raw value as JSON text, of the type that its schema says.

    A text stays a text if the schema allows only texts; else the value is tried first, and null is only the word.
    """
    types = types_of(schema, root)
    if types != {"string"}:
        spelled = WORDS.get(text.strip(), text.strip())
        try:
            value = strict_json(spelled)
        except (ValueError, RecursionError):
            pass
        else:
            if any(of_type(value, kind) for kind in types) and not (isinstance(value, str) and "string" in types):
                return spelled
    return json.dumps(text, ensure_ascii=False)


@dataclass
class Reading:
    """The state of reading one call's arguments, whose function has these `parameters`."""

    parameters: Schema
    depth: int = 0
    in_text: bool = False
    escaped: bool = False
    keys: list[str] = field(default_factory=list)


Literal = Callable[[str], str]
"""The Lark spelling of a text, in which marks may be single tokens."""


class Rules:
    """The rules of a Lark grammar under construction."""

    def __init__(self, literal: Literal, options: Mapping[str, Any]) -> None:
        self.literal = literal
        self.lines: list[str] = []
        self._options = dict(options)

    def rule(self, body: str, *, lazy: bool = False, lexeme: bool = False) -> str:
        """Add a rule; returns its name."""
        name = f"{'R' if lexeme else 'r'}{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def json(self, schema: Any, root: Schema) -> str:
        """The rule of a JSON value, with the definitions of `root` that it may refer to."""
        shared = {key: root[key] for key in (OPTIONS, "$defs", "definitions") if key in root}
        own = dict(schema) if isinstance(schema, Mapping) else {}
        return f"%json {json.dumps({OPTIONS: self._options, **shared, **own})}"

    def until(self, mark: str) -> str:
        """The rules of any text and the mark that ends it, which is not in the text."""
        spelled = self.literal(mark)
        if spelled.startswith("<["):
            text = self.rule(f"/(.|\\n)+/ & ~/(.|\\n)*{lark_regex(mark)}(.|\\n)*/", lexeme=True)
            return f"{text}? {spelled}"
        return self.rule(f"/(.|\\n)*{lark_regex(mark)}/", lazy=True)


def lark_regex(text: str) -> str:
    """A regular expression for a text, within the slashes of a Lark grammar."""
    return re.sub(r"([^\w\s<>=:\"',｜▁-])", r"\\\1", text).replace("\n", "\\n")


class Notation(ABC):
    """A notation of arguments. `begins` is a regular expression that looks ahead at their beginning."""

    begins = ""
    marks: tuple[str, ...] = ()

    @abstractmethod
    def read(self, text: str, state: Reading) -> Piece:
        """Read from the arguments what is certain by now."""

    @abstractmethod
    def grammar(self, parameters: Schema, rules: Rules) -> str:
        """The right-hand side of the rule for arguments."""


class JsonNotation(Notation):
    """A JSON object, passed on as it arrives."""

    begins = r"(?=\{)"

    def read(self, text: str, state: Reading) -> Piece:
        """See `Notation.read`."""
        for place, character in enumerate(text):
            if state.in_text:
                if state.escaped:
                    state.escaped = False
                elif character == "\\":
                    state.escaped = True
                elif character == '"':
                    state.in_text = False
            elif character == '"':
                state.in_text = True
            elif character in "{[":
                state.depth += 1
            elif character in "}]":
                state.depth -= 1
                if state.depth == 0:
                    return Piece(text[: place + 1], place + 1, done=True)
        return Piece(text, len(text), done=False)

    def grammar(self, parameters: Schema, rules: Rules) -> str:
        """See `Notation.grammar`."""
        return rules.json(parameters, {})


def properties_of(parameters: Schema) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The schemas of arguments by name, and the names of those that must be given."""
    found = resolved(parameters, parameters)
    named, required = found.get("properties"), found.get("required")
    named = named if isinstance(named, Mapping) else {}
    return named, frozenset(key for key in named if isinstance(required, list) and key in required)


@dataclass(frozen=True)
class Elements(Notation):
    """Arguments as elements with raw values: `before_key`, the key, `before_value`, the value and `after`.

    `ends` is a regular expression for what follows the last element. With `typed`, an attribute that stands for
    `{text}` in `before_value` says whether a value is a text.
    """

    before_key: str
    before_value: str
    after: str
    ends: str
    typed: bool = False

    @property
    def begins(self) -> str:  # type: ignore[override]
        """See `Notation`."""
        return rf"(?={re.escape(self.before_key)}|{self.ends})"

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Notation`."""
        return (self.before_key, self.before_value, self.after)

    def read(self, text: str, state: Reading) -> Piece:
        """See `Notation.read`: each element is passed on once it is whole."""
        found, start = "" if state.keys or state.depth else "{", 0
        state.depth = 1
        properties, _ = properties_of(state.parameters)
        while True:
            element = self._element.match(text, start)
            if element is None:
                break
            key, value = element["key"], element["value"]
            schema = properties.get(key, {})
            if self.typed:
                is_text = element["text"] == "true"
                schema = {"type": "string"} if is_text else {"type": sorted(ANY_TYPE - {"string"})}
            found += ", " if state.keys else ""
            found += f"{json.dumps(key, ensure_ascii=False)}: {json_of(value, schema, state.parameters)}"
            state.keys.append(key)
            start = element.end()
        end = re.compile(rf"\s*(?={self.ends})").match(text, start)
        return Piece(found + "}", end.end(), done=True) if end else Piece(found, start, done=False)

    @cached_property
    def _element(self) -> re.Pattern[str]:
        before = re.escape(self.before_value.rstrip("\n")).replace(re.escape("{text}"), "(?P<text>true|false)")
        before = before.replace("\\\n", r"\s*") + ("\n?" if self.before_value.endswith("\n") else "")
        after = ("\n?" if self.after.startswith("\n") else "") + re.escape(self.after.strip())
        # A value may spell the mark: it ends at the one that an element or the end of the call follows.
        key = r"(?P<key>[^<>\"]+?)"
        follows = rf"(?=\s*(?:{re.escape(self.before_key)}|{self.ends}))"
        return re.compile(rf"\s*{re.escape(self.before_key)}{key}{before}(?P<value>(?:.|\n)*?){after}{follows}")

    def grammar(self, parameters: Schema, rules: Rules) -> str:
        """See `Notation.grammar`. Keys have the order of the schema, and texts any characters but the mark."""
        properties, required = properties_of(parameters)
        found = []
        for key, schema in properties.items():
            begin = self.before_key + key
            kinds = types_of(schema, parameters)
            body = self._texts(schema, begin, parameters, rules) if "string" in kinds else ""
            if kinds != {"string"}:
                others = resolved(schema, parameters) if "string" not in kinds else {"type": sorted(kinds - {"string"})}
                head, tail = rules.literal(begin + self._before(text=False)), rules.literal(self.after)
                body += f"{' | ' if body else ''}{head} {rules.json(others, parameters)} {tail}"
            found.append(f"{rules.rule(body)}{'' if key in required else '?'}")
        return " ".join(found)

    def _before(self, *, text: bool) -> str:
        return self.before_value.replace("{text}", "true" if text else "false")

    def _texts(self, schema: Any, begin: str, parameters: Schema, rules: Rules) -> str:
        head, values = rules.literal(begin + self._before(text=True)), resolved(schema, parameters).get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) and value for value in values):
            texts = " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
            return f"{head} ({texts}) {rules.literal(self.after)}"
        rest = self.after[len(self.after.rstrip()) :]
        return f"{head} {rules.until(self.after.rstrip())} {json.dumps(rest) if rest else ''}"


class GemmaNotation(Notation):
    """Gemma 4's objects: keys without quotes, texts between marks, everything else as in JSON."""

    begins = r"(?=\{)"
    quote = '<|"|>'
    marks = (quote,)

    def read(self, text: str, _: Reading) -> Piece:
        """See `Notation.read`: arguments are passed on once they are whole."""
        # Marks are replaced by those of a JSON text; keys by theirs. A text may contain braces, so texts come first.
        parts = text.split(self.quote)
        found, depth, length = [], 0, 0
        for number, part in enumerate(parts):
            if number % 2:
                if number == len(parts) - 1:
                    break  # the text has not ended
                found.append(json.dumps(part, ensure_ascii=False))
                length += len(part) + len(self.quote)
                continue
            for place, character in enumerate(part):
                depth += (character in "{[") - (character in "}]")
                if depth == 0:
                    found.append(self._keyed(part[: place + 1]))
                    whole = "".join(found)
                    return Piece(whole, length + place + 1, done=True)
            found.append(self._keyed(part))
            length += len(part) + len(self.quote)
        return Piece("", 0, done=False)

    @staticmethod
    def _keyed(part: str) -> str:
        keyed = re.sub(r"([{,]\s*)([^\s{},:\[\]\"]+)\s*:", lambda found: f"{found[1]}{json.dumps(found[2])}: ", part)
        return re.sub(r"\bNone\b", "null", keyed)

    def grammar(self, parameters: Schema, rules: Rules) -> str:
        """See `Notation.grammar`."""
        return '"{" ' + _pairs(parameters, rules, "{}:".format, '","', self._value) + ' "}"'

    def _value(self, schema: Any, parameters: Schema, rules: Rules, depth: int = 0) -> str:
        kinds = types_of(schema, parameters)
        schema = resolved(schema, parameters)
        values = schema.get("enum")
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            texts = " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
            return f"({rules.literal(self.quote)} ({texts}) {rules.literal(self.quote)})"
        options = [JSON_SCALARS[kind] for kind in sorted(kinds & JSON_SCALARS.keys())]
        if "string" in kinds:
            options.append(f"{rules.literal(self.quote)} {rules.until(self.quote)}")
        if "array" in kinds and depth < MAX_NESTED:
            item = self._value(schema.get("items", {}), parameters, rules, depth + 1)
            options.append(f'"[" ({item} ("," {item})*)? "]"')
        if "object" in kinds and depth < MAX_NESTED:
            inside = {**schema, "$defs": parameters.get("$defs", {})}
            pairs = _pairs(
                inside, rules, "{}:".format, '","', lambda each, root, to: self._value(each, root, to, depth + 1)
            )
            options.append(f'"{{" {pairs} "}}"')
        return rules.rule(" | ".join(options))


MAX_NESTED = 3
"""The levels of lists and objects that a grammar has where the notation is not JSON."""
JSON_SCALARS = {
    "integer": "/-?(0|[1-9][0-9]*)/", "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/", "boolean": '"true" | "false"',
    "null": '"null"',
}  # fmt: skip


Value = Callable[[Any, Schema, "Rules"], str]


def _pairs(parameters: Schema, rules: Rules, key_of: Callable[[str], str], comma: str, value: Value) -> str:
    """The rules of keys and values with commas between them: those that are required, then any of the others.

    `key_of` spells a key with the sign after it.
    """
    properties, required = properties_of(parameters)
    order = sorted(properties, key=lambda key: key not in required)
    pairs = [
        rules.rule(f"{json.dumps(key_of(key), ensure_ascii=False)} {value(properties[key], parameters, rules)}")
        for key in order
    ]
    later = [f"({comma} {pair}){'' if key in required else '?'}" for key, pair in zip(order, pairs, strict=True)]
    firsts = [" ".join([pair, *later[place + 1 :]]) for place, pair in enumerate(pairs)]
    if required:
        return firsts[0]
    return f"({' | '.join(firsts)})?" if firsts else ""


class PythonNotation(Notation):
    """Keyword arguments of Python, with Python's literals."""

    text = r"""/'([^'\\\n]|\\['\\nrt])*'/ | /"([^"\\\n]|\\["\\nrt])*"/"""

    def read(self, text: str, _: Reading) -> Piece:
        """See `Notation.read`: arguments are passed on once they are whole."""
        quote, depth, escaped = "", 0, False
        for place, character in enumerate(text):
            if quote:
                ends = character == quote and not escaped
                escaped = character == "\\" and not escaped
                quote = "" if ends else quote
            elif character in "'\"":
                quote = character
            elif character == ")" and depth == 0:
                return Piece(self._json(text[:place]), place, done=True)
            else:
                depth += (character in "([{") - (character in ")]}")
        return Piece("", 0, done=False)

    @staticmethod
    def _json(text: str) -> str:
        try:
            call = ast.parse(f"f({text})", mode="eval").body
            keywords = call.keywords if isinstance(call, ast.Call) else []
            names = {"true": True, "false": False, "null": None}

            class Words(ast.NodeTransformer):
                def visit_Name(self, node: ast.Name) -> ast.expr:
                    return ast.Constant(names[node.id])

            values = {key.arg or "": ast.literal_eval(Words().visit(key.value)) for key in keywords}
            return json.dumps(values, ensure_ascii=False)
        except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
            return text

    def grammar(self, parameters: Schema, rules: Rules) -> str:
        """See `Notation.grammar`."""
        return _pairs(parameters, rules, "{}=".format, '", "', self._value)

    def _value(self, schema: Any, parameters: Schema, rules: Rules, depth: int = 0) -> str:
        kinds = types_of(schema, parameters)
        schema = resolved(schema, parameters)
        values = schema.get("enum")
        if isinstance(values, list) and values:
            return rules.rule(" | ".join(json.dumps(repr(value), ensure_ascii=False) for value in values))
        scalars = JSON_SCALARS | {"boolean": '"True" | "False"', "null": '"None"', "string": self.text}
        options = [scalars[kind] for kind in sorted(kinds & scalars.keys())]
        if "array" in kinds and depth < MAX_NESTED:
            item = self._value(schema.get("items", {}), parameters, rules, depth + 1)
            options.append(f'"[" ({item} (", " {item})*)? "]"')
        if "object" in kinds and depth < MAX_NESTED:
            options.append(f'"{{" {self._pairs(schema, parameters, rules, depth + 1)} "}}"')
        return rules.rule(" | ".join(options))

    def _pairs(self, schema: Schema, parameters: Schema, rules: Rules, depth: int) -> str:
        """The rules of a dictionary's keys and values; any, if its schema names none."""

        def value(each: Any, root: Schema, to: Rules) -> str:
            return self._value(each, root, to, depth)

        if schema.get("properties") or schema.get("additionalProperties") is False:
            return _pairs({**schema, "$defs": parameters.get("$defs", {})}, rules, "{!r}: ".format, '", "', value)
        pair = f'({self.text}) ": " {value(schema.get("additionalProperties", {}), parameters, rules)}'
        return f'({pair} (", " {pair})*)?'


JSON = JsonNotation()
GEMMA = GemmaNotation()
PYTHON = PythonNotation()
QWEN_CODER = Elements("<parameter=", ">\n", "\n</parameter>\n", r"</function>")
SEED = Elements("<parameter=", ">", "</parameter>\n", r"</function>")
GLM = Elements("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", r"</tool_call>")
HUNYUAN = Elements(
    "<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>\n",
    r"</tool_call:opensource>",
)  # fmt: skip
MINIMAX = Elements('<parameter name="', '">', "</parameter>\n", r"</invoke>")
DSML = Elements(
    '<｜DSML｜parameter name="', '" string="{text}">', "</｜DSML｜parameter>\n", r"</｜DSML｜invoke>", typed=True
)
