"""Function calling: the grammar of the model's output, the instructions for the model, and the parsing of calls.

The format is that of the Hermes and Qwen 2.5 chat templates: signatures within <tools> in the system message, each call
as {"name": ..., "arguments": {...}} within <tool_call>, each result within <tool_response>.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec
from attn_core.errors import InvalidValue, UnknownName
from attn_schema import StructuredOutput

from attn_openai.requests import compact_schema, written

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_TOOLS = 128
PARAMETERS = "tools.function.parameters"
OPENING, CLOSING = "<tool_call>", "</tool_call>"

INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The instructions of Qwen 2.5's chat template."""


class Choice(Enum):
    """The kinds of `tool_choice`: whether the model may or must call functions."""

    NONE = auto()
    AUTO = auto()
    REQUIRED = auto()
    NAMED = auto()


class ToolCall(NamedTuple):
    """A call of a function; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


def new_call_id() -> str:
    """A new id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class Function:
    """A function as described in a request."""

    name: str
    description: str | None
    parameters: dict[str, Any]

    @classmethod
    def read(cls, tool: Any, place: str) -> Function:
        """Parse the format of chat completions or the flat format of responses; raises `InvalidValue`."""
        if not isinstance(tool, dict) or tool.get("type") != "function":
            given = tool.get("type") if isinstance(tool, dict) else tool
            raise InvalidValue.of(f"{place}.type", given, "function")
        holder = tool.get("function", tool)
        name = holder.get("name") if isinstance(holder, dict) else None
        if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
            raise InvalidValue.of(f"{place}.function.name", name, "1 to 64 letters, digits, '_' and '-'")
        parameters = holder.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(parameters, dict):
            raise InvalidValue.of(f"{place}.function.parameters", parameters, "a JSON schema, an object")
        return cls(name, holder.get("description"), parameters)

    @property
    def signature(self) -> str:
        """The function's description for the model, as JSON."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function = {key: value for key, value in fields.items() if value is not None}
        return written({"type": "function", "function": function}, "tools", ensure_ascii=False)

    @property
    def rule(self) -> str:
        """The right-hand side of the Lark rule for a call of the function."""
        head = json.dumps(f'{OPENING}\n{{"name": {json.dumps(self.name)}, "arguments": ')
        return f"{head} %json {compact_schema(self.parameters, PARAMETERS)} {json.dumps('}' + chr(10) + CLOSING)}"


@dataclass(frozen=True)
class Tools:
    """The functions of a request, and whether the model may or must call them."""

    functions: tuple[Function, ...] = ()
    choice: Choice = Choice.NONE
    named: Function | None = None
    parallel: bool = True

    @classmethod
    def read(cls, tools: Any, tool_choice: Any, *, parallel: bool | None = None) -> Tools:
        """Parse the fields of a request; raises `InvalidValue` or `UnknownName`."""
        if tools is None or tools == []:
            if tool_choice not in {None, "none", "auto"} if isinstance(tool_choice, str | None) else True:
                raise InvalidValue.of("tool_choice", tool_choice, "left out without tools")
            return cls()
        if not isinstance(tools, Sequence) or isinstance(tools, str) or len(tools) > MAX_TOOLS:
            raise InvalidValue.of("tools", tools, f"a list of at most {MAX_TOOLS} functions")
        functions = tuple(Function.read(tool, f"tools[{place}]") for place, tool in enumerate(tools))
        by_name = {function.name: function for function in functions}
        if len(by_name) < len(functions):
            raise InvalidValue.of("tools", [function.name for function in functions], "functions with different names")
        choice, named = _choice(tool_choice, by_name)
        return cls(functions, choice, named, parallel is not False)

    @property
    def instructions(self) -> str:
        """The instructions for the system message; empty if the model may call no function."""
        if self.choice is Choice.NONE:
            return ""
        return INSTRUCTIONS.format(signatures="\n".join(function.signature for function in self.functions))

    def structured_output(self) -> StructuredOutput | None:
        """The grammar or JSON schema that constrains the output; None if no function can be called."""
        if self.choice is Choice.NONE:
            return None
        if self.named is not None:
            return StructuredOutput(json_schema=compact_schema(self.named.parameters, PARAMETERS))
        calls = 'call ("\\n" call)*' if self.parallel else "call"
        start = calls if self.choice is Choice.REQUIRED else f"{calls} | TEXT"
        rules = [f"start: {start}", "call: " + " | ".join(f"call{place}" for place in range(len(self.functions)))]
        rules += [f"call{place}: {function.rule}" for place, function in enumerate(self.functions)]
        if self.choice is Choice.AUTO:
            rules.append(rf"TEXT: /(.|\n)*/ & ~/{OPENING}(.|\n)*/")
        return StructuredOutput(lark="\n".join(rules))

    def reader(self) -> CallReader:
        """A new parser for one completion."""
        return CallReader(self)


def _choice(given: Any, functions: dict[str, Function]) -> tuple[Choice, Function | None]:
    words = {None: Choice.AUTO, "auto": Choice.AUTO, "none": Choice.NONE, "required": Choice.REQUIRED}
    if given is None or isinstance(given, str):
        if given not in words:
            raise InvalidValue.of("tool_choice", given, "none, auto, required, or a function")
        return words[given], None
    holder = given.get("function", given) if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(holder, dict) or not isinstance(holder.get("name"), str):
        raise InvalidValue.of("tool_choice", given, 'none, auto, required, or {"type": "function", "function": ...}')
    if holder["name"] not in functions:
        raise UnknownName.of("function of tools", holder["name"], functions)
    return Choice.NAMED, functions[holder["name"]]


@dataclass
class CallReader:
    """Splits the streamed text of a completion into plain text and function calls.

    With a named function the whole text is the arguments of one call: see `ChoiceState`.
    """

    tools: Tools
    _held: str = ""
    _is_text: bool = field(default=False)

    def read(self, text: str, *, last: bool = False) -> Iterator[str | ToolCall]:
        """Add `text`; yields the plain text and complete calls that are certain by now."""
        if self._is_text or self.tools.choice is Choice.NONE:
            if text:
                yield text
            return
        self._held += text
        if not OPENING.startswith(self._held[: len(OPENING)]):
            self._is_text, held, self._held = True, self._held, ""
            yield held
            return
        while CLOSING in self._held:
            call, self._held = self._held.split(CLOSING, 1)
            yield self._call(call)
            self._held = self._held.lstrip("\n")
        if last and self._held:
            # An incomplete call, cut off at the maximum number of tokens, is returned as text.
            held, self._held = self._held.lstrip("\n"), ""
            yield held

    def _call(self, text: str) -> ToolCall:
        call = msgspec.json.decode(text.removeprefix(OPENING))
        return ToolCall(new_call_id(), call["name"], json.dumps(call["arguments"], ensure_ascii=False))
