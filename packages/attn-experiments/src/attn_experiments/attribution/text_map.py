"""A heat map over the tokens of a text, as coloured text in the terminal and as an HTML page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from attn_core.errors import InvalidValue
from rich.text import Text

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:16px/1.3 sans-serif;margin:2em}}small{{display:block;font-size:.7em}}
span{{display:inline-block;margin:.15em 0;padding:.1em .2em;text-align:center;white-space:pre}}
th{{text-align:left;font-weight:normal;color:#555;padding-right:1em;vertical-align:top;white-space:nowrap}}</style>
<h1 style="font-size:1.1em">{title}</h1><p>{caption}</p><table>
{rows}
</table></html>
"""


def intensities(shares: Sequence[float]) -> list[float]:
    """Shares divided by the largest absolute one, from -1 to 1; raises `InvalidValue` for one that is not finite."""
    if not all(map(math.isfinite, shares)):
        raise InvalidValue.of("shares", list(shares), "finite numbers")
    most = max(map(abs, shares), default=0.0)
    return [share / most if most else 0.0 for share in shares]


def colour(intensity: float) -> tuple[int, int, int]:
    """The RGB colour of an intensity: white for 0, red towards 1, blue towards -1."""
    fade = round(255 * (1 - min(abs(intensity), 1.0)))
    return (255, fade, fade) if intensity >= 0 else (fade, fade, 255)


def coloured(tokens: Sequence[str], shares: Sequence[float]) -> Text:
    """The text for a terminal, with each token on a background of its colour; `str` of it is the plain text."""
    found = Text()
    for token, intensity in zip(tokens, intensities(shares), strict=True):
        red, green, blue = colour(intensity)
        found.append(visible(token), style=f"black on rgb({red},{green},{blue})")
    return found


def visible(token: str) -> str:
    """A token with line breaks replaced by a visible symbol."""
    return token.replace("\n", "⏎")


def as_html(tokens: Sequence[str], methods: Mapping[str, Sequence[float]], title: str, caption: str) -> str:
    """An HTML page with the text once for each method, and each token's number below it. Texts are escaped."""
    rows = []
    for name, shares in methods.items():
        words = []
        for token, share, intensity in zip(tokens, shares, intensities(shares), strict=True):
            red, green, blue = colour(intensity)
            style, number = f"background:rgb({red},{green},{blue})", f"<small>{share:+.2f}</small>"
            words.append(f'<span style="{style}" title="{share:.4g}">{html.escape(visible(token))}{number}</span>')
        rows.append(f"<tr><th>{html.escape(name)}</th><td>{''.join(words)}</td></tr>")
    return PAGE.format(title=html.escape(title), caption=html.escape(caption), rows="\n".join(rows))
