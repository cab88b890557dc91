"""What LaTeX cannot set is said, and what it can is not."""

import pytest
from attn_core import installed

from attn_testing.latex import latex_error


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        (r"a^{b", "{ is never closed"),
        (r"a}", "} does not match"),
        (r"\frac{a}", r"\frac lacks an argument"),
        (r"\sqrt", r"\sqrt lacks an argument"),
        (r"\softmax(x)", r"\softmax is not a known command"),
        (r"x^a^b", "^ occurs twice"),
        (r"\frac{1}{x_{i}_j}", "_ occurs twice"),
        (r"\left( x", r"\left is never closed"),
        (r"\left x \right)", r"\left is not followed by a delimiter"),
        (r"x_", "_ has no superscript or subscript after it"),
        (r"\begin{cases} a \end{matrix}", r"\end{matrix} does not match the last opened group"),
        ("$x$", "a dollar"),
    ],
)
def test_what_cannot_be_set_is_said(equation, message):
    assert message in (latex_error(equation) or "")


@pytest.mark.parametrize(
    "equation",
    [
        r"x^\top_i",
        r"\sum_{i}^{n} x_{i_j}^2",
        r"q^{\tilde x}_i",
        r"\begin{cases} a & b \\ c & d \end{cases}",
        r"\{a\}^2",
    ],
)
def test_what_can_be_set_has_no_fault(equation):
    assert latex_error(equation) is None


def test_every_installed_equation_can_be_set():
    assert {one.name: latex_error(one.equation) for one in installed().mechanisms if latex_error(one.equation)} == {}
