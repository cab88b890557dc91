"""`attn show` prints equations that can be read in a terminal, and loses nothing of them."""

from __future__ import annotations

import re

from attn_cli.equations import as_text
from attn_core import installed
from cases import each

LAYOUT = {"left", "right", "quad", "text", "mathrm", "textstyle", "begin", "end", ",", ";", " ", "{", "}", "\\"}
"""Macros that place what they stand beside, and say nothing themselves."""


@each("name", installed().mechanisms.names())
def test_an_equation_in_text_has_a_sign_for_every_macro(name: str) -> None:
    equation = installed().mechanisms.get(name).equation
    shown = as_text(equation)
    assert "\\" not in shown
    for macro in set(re.findall(r"\\([A-Za-z]+|.)", equation)) - LAYOUT:
        arguments = "{x}{y}" if macro.endswith("frac") else "{x}"
        assert as_text(f"a \\{macro}{arguments} b") != as_text(f"a {arguments} b"), f"\\{macro} vanishes"


def test_fractions_groups_and_cases_keep_what_belongs_together() -> None:
    assert as_text(r"\frac{Q K^\top}{\sqrt{d_k}} + S_{i+1}") == "(Q Kᵀ) / √(d_k) + S_{i+1}"
    assert as_text(r"\tfrac{w}{2} d") == "(w/2) d"
    assert as_text(r"r = \begin{cases} a & i < j \\ b & \text{else} \end{cases}") == "r = a if i < j; b else"
    assert as_text(r"a = b,\quad c = \arg\max_j d_j") == "a = b\nc = arg max_j d_j"
