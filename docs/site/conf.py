"""Sphinx settings of the documentation site: `nox -s docs` builds it into dist/site."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).parent)]

import site_pages  # noqa: E402 -- it lies in the folder that the line above adds

site_pages.write()

project = "attn"
author = "The attn authors"
root_doc = "docs/index"
include_patterns = [
    "CONTRIBUTING.md",
    "docs/**",
    *(f"{place}/*/README.md" for place in ("packages", "plugins", "services")),
]
exclude_patterns = [
    ".git",
    ".nox",
    "build",
    "changelog.d",
    "dist",
    "docs/mechanisms/README.md",
    "docs/site",
    "**/tests",
    "**/src",
]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "attn_pages"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"
suppress_warnings = ["ref.python"]
"""A name that two packages offer is linked to one of them."""

html_extra_path = ["root"]
"""Where the site begins for who opens its folder."""

html_static_path = ["../../packages/attn-cli/src/attn_cli/pages/assets/vendor"]
html_css_files = ["math.css"]
"""The font of the equations."""

html_theme = "furo"
html_title = "attn"
html_copy_source = False
html_show_copyright = False
