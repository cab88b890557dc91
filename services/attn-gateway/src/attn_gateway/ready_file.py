"""A file by which scripts detect that the server is ready, and find its address."""

from __future__ import annotations

import json
import os
from pathlib import Path

from attn_core.errors import InvalidValue

from attn_gateway.gateway import Gateway


class ReadyFile:
    """A file with JSON `{"address", "http_address", "pid", "tls", "services"}` that exists while the server serves."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def clear(self) -> None:
        """Remove the file that a killed server may have left; raises `InvalidValue` if no file can be written there."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
        except OSError as error:
            message = f"ready_file: {self._path}: {error.strerror}"
            raise InvalidValue(message, field="ready_file", given=self._path) from error

    def write(self, gateway: Gateway) -> None:
        """Write the file atomically: a reader never sees part of it."""
        if self._path is None:
            return
        facts = {
            "address": gateway.address,
            "http_address": None if gateway.http is None else gateway.http.address,
            "pid": os.getpid(),
            "tls": gateway.settings.tls is not None,
            "services": gateway.names,
        }
        half = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        half.write_text(json.dumps(facts) + "\n")
        half.replace(self._path)

    def remove(self) -> None:
        """Remove the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
