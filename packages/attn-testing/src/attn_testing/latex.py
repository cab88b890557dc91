"""Checks whether an equation is valid LaTeX mathematics, without a typesetter."""

from __future__ import annotations

import re

SIGN = re.compile(r"\\[a-zA-Z]+|\\.|[{}^_&$]|\s+|[^\\]", re.DOTALL)

TWO = "frac tfrac dfrac binom overset underset stackrel"
ONE = """sqrt text mathrm mathbf mathit mathcal mathbb mathsf boldsymbol operatorname hat tilde bar vec dot overline
underline widehat widetilde phantom begin end tag"""
NONE = """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma tau
upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
sum prod coprod int oint bigcup bigcap bigoplus bigotimes bigvee bigwedge max min arg exp log ln det dim tanh sinh cosh
sin cos tan lim sup inf gcd Pr deg ker
top bot in notin ni le leq ge geq ne neq ll gg lt gt approx sim simeq equiv propto cdot times odot otimes oplus circ ast
star pm mp div setminus cup cap subset subseteq supset supseteq emptyset varnothing infty partial nabla forall exists
neg land lor wedge vee iff implies to gets rightarrow leftarrow Rightarrow Leftarrow leftrightarrow mapsto
ldots cdots vdots ddots dots quad qquad lVert rVert lvert rvert langle rangle lceil rceil lfloor rfloor Vert vert mid
parallel perp mathbin limits nolimits displaystyle textstyle bigl bigr Bigl Bigr big Big left right middle prime ell Re
Im bmod mod pmod not hbar dagger ddagger backslash colon"""
PAIRS = "lVert rVert lvert rvert Vert vert langle rangle lceil rceil lfloor rfloor backslash"

ARGUMENTS = {**dict.fromkeys(TWO.split(), 2), **dict.fromkeys(ONE.split(), 1)}
"""The number of arguments of each command that takes any."""

SYMBOLS = frozenset(NONE.split())
"""Commands without arguments."""

MARKS = ("(", ")", "[", "]", "|", ".", "/", "<", ">", r"\{", r"\}", r"\|")
DELIMITERS = frozenset(MARKS) | {f"\\{name}" for name in PAIRS.split()}
"""The delimiters that may follow \\left and \\right."""


def latex_error(equation: str) -> str | None:
    """The first error in a LaTeX equation, in words; None if there is none.

    The known commands are those of LaTeX and amsmath that are common in equations of papers.
    """
    signs = [sign for sign in SIGN.findall(equation) if not sign.isspace()]
    opened: list[str] = []
    for place, sign in enumerate(signs):
        following = signs[place + 1 : place + 2]
        wrong = nesting_error(sign, following, opened, signs[place + 1 : place + 12]) or sign_error(sign, following)
        if wrong:
            return wrong
        count = ARGUMENTS.get(sign[1:], 0) if sign.startswith("\\") else 0
        behind = place + 1
        for _ in range(count):
            if behind >= len(signs) or signs[behind] in {"}", "^", "_", "&"}:
                return f"{sign} lacks an argument"
            behind = end_of_group(signs, behind)
    return f"{opened[-1]} is never closed" if opened else scripts_error(signs)


def sign_error(sign: str, following: list[str]) -> str | None:
    """The error in a token and the one that follows it; None if there is none."""
    if sign == "$":
        return "an equation must not contain a dollar sign"
    if sign in {"^", "_"} and (not following or following[0] in {"}", "^", "_", "&"}):
        return f"{sign} has no superscript or subscript after it"
    name = sign[1:]
    if len(sign) > 1 and sign[0] == "\\" and name.isalpha() and name not in SYMBOLS and name not in ARGUMENTS:
        return f"{sign} is not a known command"
    return "a backslash without a command" if sign == "\\" else None


def nesting_error(sign: str, following: list[str], opened: list[str], rest: list[str]) -> str | None:
    """The error in the nesting of groups, delimiter pairs and environments, or None; updates `opened`."""
    if sign in {r"\left", r"\right"} and (not following or following[0] not in DELIMITERS):
        return f"{sign} is not followed by a delimiter"
    if sign in {r"\begin", r"\end"}:
        name = "".join(rest[1 : rest.index("}")]) if rest[:1] == ["{"] and "}" in rest else ""
        sign = f"{sign}{{{name}}}"
    pairs = {"}": "{", r"\right": r"\left"}
    if sign == "{" or sign == r"\left" or sign.startswith(r"\begin"):
        opened.append(sign)
    elif sign in pairs or sign.startswith(r"\end"):
        expected = pairs.get(sign, sign.replace(r"\end", r"\begin"))
        if not opened or opened.pop() != expected:
            return f"{sign} does not match the last opened group"
    return None


def scripts_error(signs: list[str]) -> str | None:
    """The error if a symbol has two superscripts or two subscripts, in tokens with balanced groups, or None."""
    seen: list[set[str]] = [set()]
    place = 0
    while place < len(signs):
        sign = signs[place]
        if sign in {"^", "_"}:
            if sign in seen[-1]:
                return f"{sign} occurs twice on one symbol"
            seen[-1].add(sign)
            # The script itself, a group or one token, is not a new symbol.
            place = end_of_group(signs, place + 1)
            wrong = scripts_error(signs[place_of(signs, place)]) if signs[place - 1] == "}" else None
            if wrong:
                return wrong
            continue
        seen[-1] = set()
        place += 1
    return None


def end_of_group(signs: list[str], start: int) -> int:
    """The index after the group or token at `start`; for a command with arguments, after the last argument."""
    if signs[start] != "{":
        end = start + 1
        for _ in range(ARGUMENTS.get(signs[start][1:], 0) if signs[start].startswith("\\") else 0):
            end = end_of_group(signs, end) if end < len(signs) else end
        return end
    depth = 0
    for place in range(start, len(signs)):
        depth += {"{": 1, "}": -1}.get(signs[place], 0)
        if depth == 0:
            return place + 1
    return len(signs)


def place_of(signs: list[str], end: int) -> slice:
    """The slice of the contents of the group that ends before `end`."""
    depth = 0
    for place in range(end - 1, -1, -1):
        depth += {"}": 1, "{": -1}.get(signs[place], 0)
        if depth == 0:
            return slice(place + 1, end - 1)
    return slice(0, 0)
