"""What the site needs beyond Sphinx's own: equations without scripts, our docstrings, links to folders of the tree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")
LITERAL = re.compile(r"(``?[^`]+``?)")
LISTED = re.compile(r"\s*([-*]|\d+\.) ")


def inline(writer: Any, node: nodes.math) -> None:
    """Write `$...$` as MathML, which browsers draw themselves."""
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def display(writer: Any, node: nodes.math_block) -> None:
    """Write `$$...$$` as MathML, a line for each part that `\\quad` separates."""
    parts = [part for part in re.split(r",?\s*\\quad\s*", node.astext()) if part.strip()]
    lines = "".join(convert(part, display="block") for part in parts)
    writer.body.append(f'<div class="math" style="overflow-x: auto">{lines}</div>')
    raise nodes.SkipNode


PICTURE = re.compile(r'<picture>\n<source .*srcset="([^"]+)">\n<img alt="([^"]+)" src="([^"]+)">\n</picture>\n')


def both_pictures(found: re.Match[str]) -> str:
    """A picture for light and dark pages, as the theme chooses between them."""
    dark, said, light = found.groups()
    return "".join(
        f"```{{image}} {path}\n:alt: {said}\n:class: only-{page}\n```\n"
        for path, page in ((light, "light"), (dark, "dark"))
    )


def prepare_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Let links to folders lead to their README.md and links to tests to their files; chapters get their notebook."""
    here = (Path(app.srcdir) / name).parent

    def resolved(found: re.Match[str]) -> str:
        target = here / found[1]
        if target.is_dir():
            inside = f"{found[1].rstrip('/')}/README.md"
            return f"]({inside})" if (here / inside).exists() else "](#)"
        return f"]({found[1]})" if found[2] and target.suffix != ".md" else found[0]

    source[0] = PICTURE.sub(both_pictures, LINK.sub(resolved, source[0]))
    if name == "docs/decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
    if re.match(r"docs/(course/\d|start/notebook)", name):
        source[0] += f"\n{{download}}`This page as a notebook <../reference/notebooks/{Path(name).name}.ipynb>`\n"


def plain_docstring(*event: Any) -> None:
    """Escape in a docstring what reStructuredText would take for markup, and set what is indented apart."""
    lines: list[str] = event[-1]
    plain: list[str] = []
    depth = 0
    for line in lines:
        indented = len(line) - len(line.lstrip())
        if plain and line.strip() and plain[-1].strip() and indented != depth and not LISTED.match(line):
            plain.append("")
        if line.strip():
            depth = indented
        plain.append("".join(map(_escaped, LITERAL.split(line))))
    lines[:] = plain


def _escaped(part: str) -> str:
    """Text with its asterisks, bars and trailing underscores escaped; a literal as it is."""
    return part if part.startswith("`") else re.sub(r"([*|]|(?<=\w)_(?=\W|$))", r"\\\1", part)


def skips_metaclasses(_app: Sphinx, _what: str, _name: str, obj: object, _skip: bool, _options: object) -> bool | None:  # noqa: FBT001 -- Sphinx calls it
    """Leave metaclasses out of the reference: nobody calls them, and those of msgspec have no signature."""
    return True if isinstance(obj, type) and issubclass(obj, type) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of them."""
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    app.config.html_math_renderer = "mathml"
    app.connect("source-read", prepare_page)
    app.connect("autodoc-skip-member", skips_metaclasses)
    app.connect("autodoc-process-docstring", plain_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
