"""Mechanisms that a layout needs and that come in packages of their own."""

from __future__ import annotations

from attn_core import installed
from attn_core.errors import UnknownName


def require_mechanism(name: str, package: str, layout: str) -> None:
    """Raises `UnknownName`, which names the package to install, where no mechanism of this name is there."""
    try:
        installed().mechanisms.full_name(name)
    except UnknownName as error:
        message = f"unknown mechanism {name!r}, which layers of a {layout} model compute; pip install {package}"
        raise UnknownName(message, kind="mechanism", name=name, package=package) from error
