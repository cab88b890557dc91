"""Packages that import what they export on first use.

Listing plugins imports the packages that offer them, and must import neither torch nor gRPC with them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, Sequence[str]]) -> None:
    """Give a package `__getattr__` and `__dir__` (PEP 562), unseen by type checkers; `homes` has its names by module.

    In the package's `__init__.py`, with the same imports under `TYPE_CHECKING`:

        lazy_names(__name__, {"client": ("Client",)})
    """
    modules = {name: f"{package}.{module}" for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    def names() -> list[str]:
        return sorted({*modules, *getattr(sys.modules[package], "__all__", ())})

    vars(sys.modules[package]).update(__getattr__=get, __dir__=names)
