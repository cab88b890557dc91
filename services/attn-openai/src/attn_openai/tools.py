"""Function calling: the functions of a request, and the grammar that the model's output must match."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

from attn_core.errors import InvalidValue, UserError
from attn_schema import StructuredOutput
from attn_schema.sampling import MAX_GRAMMAR_CHARACTERS

from attn_openai.call_formats import VARIABLE
from attn_openai.messages import require_known
from attn_openai.notations import Rules, lark_regex
from attn_openai.output_reader import OutputReader
from attn_openai.requests import renamed
from attn_openai.schemas import COMPACT, schema_of, written
from attn_openai.templates import ChatTemplate

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MAX_TOOLS = 128
TOOL_FIELDS = frozenset({"type", "function", "name", "description", "parameters", "strict"})
BLANKS = '("\\n\\n" | "\\n" | " ")?'
"""The blanks that a model may write between a thought and what follows."""


class Choice(Enum):
    """The kinds of `tool_choice`: whether the model may or must call functions."""

    NONE = auto()
    AUTO = auto()
    REQUIRED = auto()


@dataclass(frozen=True)
class Function:
    """A function as described in a request; `strict` says whether its arguments must match its whole schema."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool = False

    @classmethod
    def read(cls, tool: Any, place: str) -> Function:
        """Parse the format of chat completions or the flat format of responses; raises `InvalidValue`."""
        if not isinstance(tool, dict) or tool.get("type") != "function":
            given = tool.get("type") if isinstance(tool, dict) else tool
            raise InvalidValue.of(f"{place}.type", given, "function")
        holder = tool.get("function", tool)
        name = holder.get("name") if isinstance(holder, dict) else None
        if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
            raise InvalidValue.of(f"{place}.function.name", name, "1 to 128 letters, digits, '_', '.' and '-'")
        require_known(tool, place, TOOL_FIELDS)
        require_known(holder, f"{place}.function", TOOL_FIELDS)
        description, strict = holder.get("description"), holder.get("strict")
        if not isinstance(description, str | None):
            raise InvalidValue.of(f"{place}.function.description", description, "a text")
        if not isinstance(strict, bool | None):
            raise InvalidValue.of(f"{place}.function.strict", strict, "true or false")
        parameters = holder.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(parameters, dict):
            raise InvalidValue.of(f"{place}.function.parameters", parameters, "a JSON schema, an object")
        # Arguments are an object, whether or not the schema says so.
        parameters = {"type": "object", **parameters}
        if parameters["type"] != "object":
            raise InvalidValue.of(f"{place}.function.parameters.type", parameters["type"], "object")
        size = len(written(parameters, f"{place}.function.parameters"))
        if size > MAX_GRAMMAR_CHARACTERS:
            allowed = f"at most {MAX_GRAMMAR_CHARACTERS} characters"
            raise InvalidValue.of(f"{place}.function.parameters", f"{size} characters", allowed)
        return cls(name, description, parameters, strict is True)

    @property
    def described(self) -> dict[str, Any]:
        """The function as chat templates describe it."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}

    @property
    def constraint(self) -> dict[str, Any]:
        """The schema by which its arguments are constrained."""
        return schema_of(self.parameters, "tools.function.parameters", strict=self.strict)


@dataclass(frozen=True)
class Tools:
    """The functions of a request, and whether the model may or must call them; `callable` are those that it may."""

    functions: tuple[Function, ...] = ()
    choice: Choice = Choice.NONE
    callable: tuple[Function, ...] = ()
    parallel: bool = True

    @classmethod
    def read(cls, tools: Any, tool_choice: Any, *, parallel: bool | None = None) -> Tools:
        """Parse the fields of a request; raises `InvalidValue` or `UnknownName`."""
        if tools is None or tools == []:
            if tool_choice not in {None, "none", "auto"} if isinstance(tool_choice, str | None) else True:
                raise InvalidValue.of("tool_choice", tool_choice, "left out without tools")
            return cls()
        if not isinstance(tools, Sequence) or isinstance(tools, str) or len(tools) > MAX_TOOLS:
            shown = f"{len(tools)} functions" if isinstance(tools, list) else tools
            raise InvalidValue.of("tools", shown, f"a list of at most {MAX_TOOLS} functions")
        functions = tuple(Function.read(tool, f"tools[{place}]") for place, tool in enumerate(tools))
        by_name = {function.name: function for function in functions}
        if len(by_name) < len(functions):
            raise InvalidValue.of("tools", [function.name for function in functions], "functions with different names")
        choice, named = _choice(tool_choice, by_name)
        forced = isinstance(tool_choice, dict) and tool_choice.get("type") == "function"
        return cls(functions, choice, named, parallel is not False and not forced)

    @property
    def described(self) -> list[dict[str, Any]]:
        """The functions as chat templates describe them; none if the model may call none."""
        return [function.described for function in self.functions] if self.choice is not Choice.NONE else []

    def reader(self, template: ChatTemplate, *, thinking: bool) -> OutputReader:
        """A new reader for one completion."""
        calls = None if self.choice is Choice.NONE else template.calls
        functions = {function.name: function.parameters for function in self.callable}
        return OutputReader(calls, template.thoughts, functions, thinking)


def _choice(given: Any, functions: dict[str, Function]) -> tuple[Choice, tuple[Function, ...]]:
    words = {None: Choice.AUTO, "auto": Choice.AUTO, "none": Choice.NONE, "required": Choice.REQUIRED}
    if given is None or isinstance(given, str):
        if given not in words:
            raise InvalidValue.of("tool_choice", given, "none, auto, required, or a function")
        return words[given], tuple(functions.values())
    names, choice = _names(given), Choice.REQUIRED
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        choice = Choice.REQUIRED if given.get("allowed_tools", given).get("mode") == "required" else Choice.AUTO
    for name in names:
        if name not in functions:
            raise InvalidValue.of("tool_choice", name, f"one of tools: {', '.join(functions)}")
    return choice, tuple(functions[name] for name in names)


def _names(given: Any) -> list[str]:
    """The functions that a `tool_choice` names, of the type function or allowed_tools."""
    kind = given.get("type") if isinstance(given, dict) else None
    chosen: list[Any] = [given]
    if kind == "allowed_tools":
        holder = given.get("allowed_tools", given)
        tools = holder.get("tools") if isinstance(holder, dict) else None
        chosen = tools if isinstance(tools, list) else []
    names = []
    for one in chosen:
        holder = one.get("function", one) if isinstance(one, dict) and one.get("type") == "function" else None
        if isinstance(holder, dict) and isinstance(holder.get("name"), str):
            names.append(holder["name"])
    if not names or len(names) < len(chosen):
        raise InvalidValue.of("tool_choice", given, 'none, auto, required, or {"type": "function", "function": ...}')
    return names


SCHEMA_ERROR = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*)")
"""What the engine says of a schema in a grammar: the line, and what is wrong."""


class OutputGrammar:
    """The Lark grammar of one completion: a thought, if the model writes one, then an answer, or calls.

    `answer` is the schema of the answer, None for any text. `thinking` says whether the prompt ends within a thought.
    """

    def __init__(self, tools: Tools, template: ChatTemplate, answer: dict[str, Any] | None, *, thinking: bool) -> None:
        self._tools, self._template, self._answer, self._thinking = tools, template, answer, thinking
        self._marks = dict(template.marks)
        self._rules = Rules(self._literal, COMPACT)

    def structured_output(self) -> StructuredOutput | None:
        """The grammar; None if any text is allowed."""
        if self._tools.choice is Choice.NONE and self._answer is None:
            return None
        start = f"start: {self._thought()}({self._body()})"
        lark = "\n".join([start, *self._rules.lines])
        if len(lark) > MAX_GRAMMAR_CHARACTERS:
            allowed = f"schemas of at most {MAX_GRAMMAR_CHARACTERS} characters together"
            raise InvalidValue.of(self._field, f"{len(lark)} characters of schemas", allowed)
        return StructuredOutput(lark=lark)

    def explained(self, error: UserError) -> UserError:
        """An error of the grammar as one of the field of the request whose schema cannot be followed."""
        found = SCHEMA_ERROR.search(error.message)
        if error.metadata.get("field") != "structured_output":
            return error
        if found is None:
            return renamed(error, self._field)
        line, field = int(found[1]), "response_format.json_schema.schema"
        # The rules of a function's arguments follow those of the one before; the schema of the answer is in line 1.
        for function in self._tools.callable if line > 1 else ():
            if line <= int(self._arguments[function.name][1:]) + 2:
                field = f"tools[{self._tools.functions.index(function)}].function.parameters"
                break
        return InvalidValue(f"{field}: the schema cannot be followed strictly: {found[2]}", field=field)

    @property
    def _field(self) -> str:
        return "response_format" if self._tools.choice is Choice.NONE else "tools"

    def _thought(self) -> str:
        form = self._template.thoughts
        if form is None:
            return ""
        after = f"({self._literal(form.after)})? " if form.after else ""
        rest = f"{self._rules.until(form.closing)} {after}{BLANKS} "
        return rest if self._thinking else f"({self._literal(form.opening)} {rest})? "

    def _body(self) -> str:
        calls, thoughts = self._template.calls, self._template.thoughts
        names = [function.name for function in self._tools.callable]
        answer = f"({self._literal(thoughts.answer)})? " if thoughts and thoughts.answer else ""
        if self._answer is not None:
            answer += self._rules.json(self._answer, {})
        if self._tools.choice is Choice.NONE:
            return answer
        calling = " | ".join(self._section(function, "") for function in self._tools.callable)
        if self._tools.choice is Choice.REQUIRED:
            return f"({calling}) ({self._literal(calls.between)} ({calling}))*" if self._repeats else calling
        if self._answer is not None:
            return f"{calling} | {answer}"
        triggers = calls.triggers(names)
        not_in = "".join(f" & ~/(.|\\n)*{lark_regex(trigger)}(.|\\n)*/" for trigger in triggers)
        text = self._rules.rule(f"/(.|\\n)+/{not_in}", lexeme=True)
        started = " | ".join(
            f"{self._rules.until(trigger)} ({' | '.join(self._section(one, trigger) for one in functions)})"
            for trigger, functions in self._by_trigger().items()
        )
        return f"{answer}({started}){'*' if self._parallel else '?'} {text}?"

    @property
    def _parallel(self) -> bool:
        return self._tools.parallel and self._template.parallel

    @property
    def _repeats(self) -> bool:
        """Whether one call after another makes several; else they are inside one section."""
        calls = self._template.calls
        return self._parallel and not calls.closing

    def _by_trigger(self) -> dict[str, list[Function]]:
        calls = self._template.calls
        found: dict[str, list[Function]] = {}
        for function in self._tools.callable:
            trigger = calls.trigger if calls.before_name else calls.triggers([function.name])[0]
            found.setdefault(trigger, []).append(function)
        return found

    def _section(self, function: Function, trigger: str) -> str:
        """A section of calls whose first is of `function`, without the trigger that it begins with."""
        calls = self._template.calls
        head = calls.opening + calls.before_name + function.name + calls.after_name
        first = f"{self._literal(head.removeprefix(trigger))} {self._arguments[function.name]}"
        more = f"({self._later})*" if self._parallel and calls.closing else ""
        return f"{first} {more} {self._literal(calls.closing)}"

    @cached_property
    def _later(self) -> str:
        """The rule of a call that is not the first of its section."""
        calls = self._template.calls
        return self._rules.rule(
            " | ".join(
                f"{self._literal(calls.between + calls.before_name + name + calls.after_name)} {arguments}"
                for name, arguments in self._arguments.items()
            )
        )

    @cached_property
    def _arguments(self) -> dict[str, str]:
        """The rules of the functions' arguments, with what follows them, by name."""
        calls = self._template.calls
        return {
            function.name: self._rules.rule(
                f"{calls.notation.grammar(function.constraint, self._rules)} {self._literal(calls.after)}"
            )
            for function in self._tools.callable
        }

    def _literal(self, text: str) -> str:
        """A text in Lark: marks that are single tokens by their ids, and numbers and ids of calls."""
        marks = sorted((re.escape(mark) for mark in self._marks), key=len, reverse=True)
        found = []
        for part in re.split(f"({'|'.join([*marks, VARIABLE.pattern])})", text):
            if part in self._marks:
                found.append(f"<[{self._marks[part]}]>")
            elif VARIABLE.fullmatch(part):
                found.append("/[0-9]+/" if part == "{index}" else "/[A-Za-z0-9]{9}/")
            elif part:
                found.append(json.dumps(part, ensure_ascii=False))
        return " ".join(found)
