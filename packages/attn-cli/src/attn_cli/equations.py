"""Equations for a terminal: converts LaTeX to plain text with Unicode symbols."""

from __future__ import annotations

import re
from functools import cache

from pylatexenc import latexwalker
from pylatexenc.latex2text import LatexNodes2Text, MacroTextSpec, get_default_latex_context_db


def as_text(equation: str) -> str:
    r"""Convert LaTeX to plain text, one line per part separated by `\quad`.

    Groups of several letters keep their braces if these show what belongs together: `S_{i+1}`, `R^{n×k}`.
    """
    parts = re.split(r",?\s*\\q?quad\s*", equation)
    return "\n".join(_text(part) for part in parts if part.strip())


def _text(part: str) -> str:
    text = _converter().latex_to_text(_without_layout(part))
    text = re.sub(r"\s+", " ", text.replace("^ᵀ", "ᵀ ")).strip()
    text = re.sub(r" ([⌋⌉‖,;)\]}])", r"\1", text)  # drop spaces that only end the name of a macro
    text = re.sub(r"(?<=[^\s(\[{])([≤≥≈∈∼∝∪∖=])(?=\S)", r" \1 ", re.sub(r"([≤≥≈∈∼∝∪∖×∘])(?=\S)", r"\1 ", text))
    return text.replace("if else", "else")


def _without_layout(part: str) -> str:
    """The equation with small fractions and cases as words on one line."""
    part = re.sub(r"\\[td]frac\{(\w+)\}\{(\w+)\}", r"(\1/\2)", part)
    cases = re.compile(r"\\begin\{cases\}(.*?)\\end\{cases\}")
    return cases.sub(lambda found: found[1].replace("&", r"\text{ if }").replace(r"\\", ";"), part)


@cache
def _converter() -> LatexNodes2Text:
    context = get_default_latex_context_db()
    own = [MacroTextSpec("frac", _fraction), *(MacroTextSpec(name, text) for name, text in WORDS.items())]
    context.add_context_category("attn", prepend=True, macros=own)
    return LatexNodes2Text(
        math_mode="text", latex_context=context, keep_braced_groups=True, keep_braced_groups_minlen=2
    )


WORDS = {
    "|": "‖",
    "arg": "arg ",
    "bmod": " mod ",
    "cdot": " · ",
    "gets": " ← ",
    "leftarrow": " ← ",
    "ln": "ln ",
    "log": "log ",
    "mid": " | ",
    "notin": " ∉ ",
    "odot": " ⊙ ",
    "top": "ᵀ",
}
"""Text for macros that pylatexenc omits, or joins with the text that follows."""


def _fraction(node: latexwalker.LatexMacroNode, l2tobj: LatexNodes2Text) -> str:
    above, below = (l2tobj.nodelist_to_text([argument]) for argument in node.nodeargs)
    return f"{_joined(above)} / {_joined(below)}"


def _joined(text: str) -> str:
    """The text without its outer braces, in parentheses if it is more than one factor."""
    text = text[1:-1] if text.startswith("{") else text
    return f"({text})" if re.search(r"[\s+\-]", text) else text
