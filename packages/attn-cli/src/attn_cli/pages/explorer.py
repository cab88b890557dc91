"""The attention explorer without a server: one HTML file, or a frame in a notebook, that contains the weights."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from attn_core.errors import InvalidValue
from attn_schema import AttentionMap

from attn_cli.pages.assets import assets, hash_source

MODULES = ("dom.js", "maps.js", "matrix.js", "lines.js", "explorer.js", "standalone.js")
"""The modules of the page, each after those that it imports."""
MAX_BYTES = 64 * 2**20
"""Most bytes of weights in one page; a browser becomes slow with more."""
FRAME_HEIGHT = 900
"""The height of the frame in a notebook, in pixels."""

IMPORT = re.compile(r'^import .* from "\./([\w.-]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)


class AttentionPage:
    """The attention maps of one model, or of two models to compare, as a web page.

    A notebook displays it directly; `save` writes it as one file that needs no network and no server.
    """

    def __init__(self, views: Sequence[tuple[str, Sequence[AttentionMap]]]) -> None:
        """`views`: a label, such as a model's name, and its maps. Raises `InvalidValue` for none or too many."""
        if not 1 <= len(views) <= 2:
            raise InvalidValue.of("views", len(views), "one model, or two to compare")
        for label, maps in views:
            if not maps:
                raise InvalidValue.of("maps", f"none of {label}", "at least one layer")
        size = sum(len(one.attention_weights.data) for _, maps in views for one in maps)
        if size > MAX_BYTES:
            allowed = f"at most {MAX_BYTES} bytes: choose layers or heads, or a shorter sentence"
            raise InvalidValue.of("maps", f"{size} bytes of weights", allowed)
        self._views = [(label, tuple(maps)) for label, maps in views]

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"Attention: {' and '.join(label for label, _ in self._views)}"

    def html(self) -> str:
        """The page as HTML: with inline script, style and weights, and a policy that lets it load nothing else."""
        script, style = bundle(), assets()["style.css"].text.strip()
        policy = (
            f"default-src 'none'; script-src {hash_source(script)}; style-src {hash_source(style)}; base-uri 'none'"
        )
        values = {"views": [{"label": label, "layers": list(map(layer, maps))} for label, maps in self._views]}
        # With "<" escaped, the data cannot end the element that contains it.
        data = msgspec.json.encode(values).decode().replace("<", "\\u003c")
        return (
            "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
            f"<title>{escape(self.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
            f"<main><h1>{escape(self.title)}</h1><div id='main'></div></main>\n"
            f"<script type='application/json' id='views'>{data}</script>\n"
            f"<script type='module'>{script}</script>\n</body>\n</html>\n"
        )

    def save(self, path: str | Path) -> Path:
        """Write the page; raises `InvalidValue` for a path that cannot be written."""
        target = Path(path)
        try:
            target.write_text(self.html(), "utf-8")
        except OSError as error:
            raise InvalidValue.of("html", str(path), f"a file that can be written ({error.strerror})") from error
        return target

    def _repr_html_(self) -> str:
        frame = f"width='100%' height='{FRAME_HEIGHT}' style='border:0' sandbox='allow-scripts allow-downloads'"
        return f'<iframe {frame} title="{escape(self.title)}" srcdoc="{escape(self.html())}"></iframe>'

    def __repr__(self) -> str:
        layers = ", ".join(f"{label}: {len(maps)} layers" for label, maps in self._views)
        return f"AttentionPage({layers}); save(path) writes it as one HTML file"


def explore(
    maps: Sequence[AttentionMap],
    other: Sequence[AttentionMap] = (),
    *,
    label: str = "model",
    other_label: str = "other",
) -> AttentionPage:
    """The attention explorer of `maps`, as `Client.attention_maps` returns them, beside `other` if it is given.

    As the last expression of a cell, a notebook displays it. Raises `InvalidValue` for no maps, or too many.
    """
    views = [(label, maps), *([(other_label, other)] if other else [])]
    return AttentionPage(views)


def bundle() -> str:
    """The modules of the explorer as one script; each must come after those that it imports."""
    parts: list[str] = []
    for place, name in enumerate(MODULES):
        text = assets()[name].text
        for imported in IMPORT.findall(text):
            if imported not in MODULES[:place]:
                raise InvalidValue.of("MODULES", f"{name} imports {imported}", "only modules before it")
        parts.append(EXPORT.sub("", IMPORT.sub("", text)))
    return "".join(parts).strip()


def layer(one: AttentionMap) -> dict[str, Any]:
    """A map in the JSON form of the message AttentionMapsResponse, which the pages read."""
    weights = one.attention_weights
    return {
        "layer": one.layer,
        "mechanism": one.mechanism,
        "heads": one.heads,
        "attention_weights": {"shape": weights.shape, "data": base64.b64encode(weights.data).decode()},
        "query_tokens": one.query_tokens,
        "key_tokens": one.key_tokens,
        "input_gradients": one.input_gradients,
        "next_token": one.next_token,
        "gradients_note": one.gradients_note,
        "cross_attention": one.cross_attention,
    }
