"""The files of the web application, as stored in this package: no build step, nothing from other hosts."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
INDEX = "index.html"
"""The main page, which contains all others."""

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
"""The content security policy of the served pages: they may use this origin alone, and no inline script or style."""

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
"""The headers of every file; with `no-cache`, a browser revalidates its copy by the entity tag."""


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One file: its path below the root of the pages, its bytes, media type and entity tag."""

    path: str
    content: bytes
    media_type: str
    etag: str

    @property
    def text(self) -> str:
        """The content as text."""
        return self.content.decode()


@cache
def assets() -> dict[str, Asset]:
    """All files by their paths, such as "app.js" or "vendor/uPlot.min.css"."""
    return {asset.path: asset for asset in _found(resources.files("attn_cli.pages") / "assets", "")}


def _found(folder: Traversable, before: str) -> list[Asset]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        path = f"{before}{entry.name}"
        if entry.is_dir():
            found += _found(entry, f"{path}/")
            continue
        suffix = f".{entry.name.rpartition('.')[2]}"
        if suffix not in MEDIA_TYPES:
            continue
        content = entry.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
        found.append(Asset(path=path, content=content, media_type=MEDIA_TYPES[suffix], etag=etag))
    return found


def hash_source(text: str) -> str:
    """The source expression of a content security policy for an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
