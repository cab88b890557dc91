"""How families of models write function calls and thoughts in text: data, by which calls are read and constrained.

A call is `before_name`, the name, `after_name`, the arguments and `after`; several calls have `between` between them,
and all of them `opening` before and `closing` after. The marks are those that chat templates write for past calls, as a
model writes what its template has shown it in training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_openai.notations import DSML, GEMMA, GLM, HUNYUAN, JSON, MINIMAX, PYTHON, QWEN_CODER, SEED, Notation

NAME = r"(?P<name>[A-Za-z0-9_.-]{1,128}?)"
BLANKS = re.compile(r"\s+")
VARIABLE = re.compile(r"\{index\}|\{id\}")
VARIABLES = {"{index}": r"\d+", "{id}": r"[A-Za-z0-9_.:-]*"}
MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Marks that may be single tokens."""


def tolerant(piece: str) -> str:
    """A regular expression for a piece of a format, whatever blanks it has, and whatever id or number."""
    parts = re.split(f"({BLANKS.pattern}|{VARIABLE.pattern})", piece)
    read = [VARIABLES.get(part) or (r"\s*" if BLANKS.fullmatch(part) else re.escape(part)) for part in parts]
    return r"\s*" + "".join(read) + r"\s*"


@dataclass(frozen=True)
class CallFormat:
    """A way to write calls. `also` has other spellings of `before_name` and `after_name` that are read."""

    name: str
    before_name: str
    after_name: str
    after: str = ""
    notation: Notation = JSON
    opening: str = ""
    between: str = ""
    closing: str = ""
    also: tuple[tuple[str, str], ...] = ()
    starts: str = ""

    @property
    def trigger(self) -> str:
        """The text by which calls are recognised: `starts`, or the first mark or word of a call."""
        start = self.opening + self.before_name
        mark = MARK.match(start)
        return self.starts or (mark[0] if mark else start.split()[0])

    def triggers(self, names: Sequence[str]) -> tuple[str, ...]:
        """All texts by which calls of these functions are recognised."""
        if not self.before_name:  # such as [name(
            return tuple(f"{self.opening}{name}{self.after_name}" for name in names)
        return tuple(dict.fromkeys((self.trigger, *(before for before, _ in self.also))))

    def head(self) -> re.Pattern[str]:
        """What comes before the arguments of a call, from its beginning, or from the end of the call before it."""
        opening = f"(?:{tolerant(self.opening)})?(?:{tolerant(self.between)})?" if self.opening or self.between else ""
        spellings = ((self.before_name, self.after_name), *self.also)
        each = [f"{tolerant(before)}{NAME}{tolerant(after)}" for before, after in spellings]
        # The name, which may occur in one spelling only, is the group that took part.
        named = [one.replace("<name>", f"<name{place}>") for place, one in enumerate(each)]
        return re.compile(f"{opening}(?:{'|'.join(named)}){self.notation.begins}")

    def tail(self) -> re.Pattern[str]:
        """What comes after the arguments of a call; templates add the id of a call to its object."""
        extra = r'(?:\s*,\s*"(?:id|tool_call_id)"\s*:\s*"[^"]*")?' if self.notation is JSON else ""
        return re.compile(f"{extra}{tolerant(self.after)}")

    def pieces(self) -> tuple[str, ...]:
        """All texts of the format, which have its marks."""
        return (self.opening, self.before_name, self.after_name, self.after, self.closing, *self.notation.marks)


def _object(name: str, opening: str = "", closing: str = "", **fields: Any) -> CallFormat:
    """A format in which a call is a JSON object with its name and arguments, alone or in a list."""
    key, arguments = fields.pop("keys", ("name", "arguments"))
    return CallFormat(name, f'{{"{key}": "', f'", "{arguments}": ', "}", opening=opening, closing=closing, **fields)


HERMES = CallFormat(
    "hermes", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"
)  # fmt: skip
"""Qwen 2.5 and 3, Hermes, Granite 4, SmolLM3."""
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)

FORMATS = (
    HERMES,
    CallFormat(
        "qwen_coder", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", QWEN_CODER, between="\n"
    ),
    CallFormat("glm", "<tool_call>", "\n", "</tool_call>", GLM, between="\n"),
    CallFormat("mistral", "[TOOL_CALLS]", "[CALL_ID]{id}[ARGS]"),
    CallFormat("mistral_args", "[TOOL_CALLS]", "[ARGS]"),
    _object("mistral_list", "[TOOL_CALLS] [", "]", between=", "),
    CallFormat(
        "deepseek_v3", f"{DEEPSEEK[1]}function{DEEPSEEK[2]}", "\n```json\n", f"\n```{DEEPSEEK[3]}",
        opening=DEEPSEEK[0], between="\n", closing=DEEPSEEK[4],
    ),
    CallFormat(
        "deepseek_v31", DEEPSEEK[1], DEEPSEEK[2], DEEPSEEK[3], opening=DEEPSEEK[0], closing=DEEPSEEK[4]
    ),
    *(
        CallFormat(
            f"deepseek_{word}", '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n", DSML,
            opening=f"<｜DSML｜{word}>\n", closing=f"</｜DSML｜{word}>",
        )
        for word in ("function_calls", "tool_calls")
    ),
    CallFormat(
        "kimi", "<|tool_call_begin|>functions.", ":{index}<|tool_call_argument_begin|>", "<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>", closing="<|tool_calls_section_end|>",
    ),
    CallFormat(
        "harmony", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>",
        starts="<|channel|>commentary to=functions.",
        also=(
            ("<|channel|>commentary to=functions.", " json<|message|>"),
            ("<|start|>assistant to=functions.", "<|channel|>commentary json<|message|>"),
            ("to=functions.", "<|channel|>commentary json<|message|>"),
            ("to=functions.", "<|channel|>commentary <|constrain|>json<|message|>"),
        ),
    ),
    CallFormat(
        "minimax", '<invoke name="', '">\n', "</invoke>\n", MINIMAX,
        opening="<minimax:tool_call>\n", closing="</minimax:tool_call>",
    ),
    CallFormat(
        "seed", "<function=", ">\n", "</function>\n", SEED,
        opening="<seed:tool_call>\n", closing="</seed:tool_call>",
    ),
    CallFormat(
        "hunyuan", "<tool_call:opensource>", "<tool_sep:opensource>\n", "</tool_call:opensource>\n", HUNYUAN,
        opening="<tool_calls:opensource>\n", closing="</tool_calls:opensource>",
    ),
    CallFormat("gemma", "<|tool_call>call:", "", "<tool_call|>", GEMMA),
    CallFormat(
        "command", '{"tool_call_id": "{index}", "tool_name": "', '", "parameters": ', "}",
        opening="<|START_ACTION|>[\n    ", between=",\n    ", closing="\n]<|END_ACTION|>",
    ),
    _object(
        "command_r", "Action:\n```json\n[\n    ", "\n]```", between=",\n    ", keys=("tool_name", "parameters")
    ),
    _object("granite_list", "<|tool_call|>[", "]", between=", "),
    _object("phi", "<|tool_call|>", "<|/tool_call|>"),
    _object("nemotron", "<TOOLCALL>[", "]</TOOLCALL>", between=", "),
    _object("jamba", "<tool_calls>[\n    ", "\n]</tool_calls>", between=",\n    "),
    CallFormat(
        "lfm2", "", "(", ")", PYTHON, opening="<|tool_call_start|>[", between=", ", closing="]<|tool_call_end|>"
    ),
    CallFormat("pythonic", "", "(", ")", PYTHON, opening="[", between=", ", closing="]"),
    _object("llama_json", keys=("name", "parameters")),
)  # fmt: skip
"""All formats; where several fit what a template writes, the first is taken."""


@dataclass(frozen=True)
class ThoughtFormat:
    """The marks around a model's thoughts, and those that begin an answer or mean nothing, which are left out."""

    opening: str
    closing: str
    answer: str = ""
    dropped: tuple[str, ...] = ()
    after: str = ""


THOUGHTS = (
    ThoughtFormat("<think>", "</think>"),
    ThoughtFormat(
        "<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>",
        ("<|start|>assistant", "<|channel|>commentary<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        after="<|start|>assistant",
    ),
    ThoughtFormat("[THINK]", "[/THINK]"),
    ThoughtFormat("<|channel>thought\n", "<channel|>"),
    ThoughtFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", ("<|END_RESPONSE|>",)
    ),
    ThoughtFormat("<mm:think>", "</mm:think>"),
    ThoughtFormat("<seed:think>", "</seed:think>"),
    ThoughtFormat("<think:opensource>", "</think:opensource>"),
)  # fmt: skip
