"""A file that tells scripts that the server is ready and where."""

from __future__ import annotations

import json
import os
from pathlib import Path

from attn_core.errors import InvalidValue

from attn_gateway.gateway import Gateway


class ReadyFile:
    """JSON `{"address", "http_address", "pid", "tls", "services"}`, there exactly while the server serves."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def clear(self) -> None:
        """Remove what a server that was killed may have left; raises `InvalidValue` if no file can be there."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
        except OSError as error:
            message = f"ready_file: {self._path}: {error.strerror}"
            raise InvalidValue(message, field="ready_file", given=self._path) from error

    def write(self, gateway: Gateway) -> None:
        """Write the file at once: a reader never sees half of it."""
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
