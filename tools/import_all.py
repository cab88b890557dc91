"""Import every module of the packages named on the command line, to find dependencies that are not declared.

python tools/import_all.py attn_core attn_models
"""

from __future__ import annotations

import importlib
import pkgutil
import sys


def modules(package: str) -> list[str]:
    """The package and all modules below it, except `__main__`, whose import would run a program."""
    found = [package]
    for path in getattr(importlib.import_module(package), "__path__", []):
        below = pkgutil.walk_packages([path], f"{package}.", onerror=_raise)
        found += [module.name for module in below if not module.name.endswith(".__main__")]
    return found


def _raise(name: str) -> None:
    """Called by pkgutil while it handles the exception that importing `name` raised."""
    raise ImportError(f"cannot import {name}") from sys.exc_info()[1]


def main() -> None:
    """Import all modules and print their number."""
    for package in sys.argv[1:]:
        names = modules(package)
        for name in names:
            importlib.import_module(name)
        print(f"{package}: {len(names)} modules import with the declared needs alone")


if __name__ == "__main__":
    main()
