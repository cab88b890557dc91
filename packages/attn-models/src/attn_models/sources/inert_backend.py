"""A build backend that builds nothing, so that fetching a source archive runs no code of the package.

Before pip keeps a downloaded source archive it asks the archive's build backend for a name and a version, which for
most archives means running their setup.py. `download` copies this file to a temporary folder as
setuptools/build_meta.py and puts that folder first on pip's import path, so that pip gets the name and version from
here. It must therefore import nothing but the standard library.

Interface: PEP 517.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

NAME_VARIABLE = "ATTN_INERT_NAME"
VERSION_VARIABLE = "ATTN_INERT_VERSION"


class InertBackend:
    """Answers pip's two calls for any source archive from two environment variables."""

    def get_requires_for_build_wheel(self, _settings: Any = None) -> list[str]:
        """No requirements."""
        return []

    def prepare_metadata_for_build_wheel(self, metadata_directory: str, _settings: Any = None) -> str:
        """Write minimal valid METADATA and return the name of its folder."""
        name, version = os.environ[NAME_VARIABLE], os.environ[VERSION_VARIABLE]
        folder = Path(metadata_directory) / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return folder.name


__legacy__ = InertBackend()
get_requires_for_build_wheel = __legacy__.get_requires_for_build_wheel
prepare_metadata_for_build_wheel = __legacy__.prepare_metadata_for_build_wheel
