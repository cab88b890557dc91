"""A bucket of the S3 protocol that fails for as long as it is told to: 503, or for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FailingBucket(ThreadingHTTPServer):
    """Keeps what is put, lists nothing; answers 503 to the next `failures` requests and until `fails_until`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), BucketRequests)
        self.objects: dict[str, bytes] = {}
        self.failures = 0
        self.failed = 0
        self.fails_until = 0.0
        """A time of `time.monotonic`."""
        self.lists = False
        """Whether it can be listed, as an empty one; else it is not there."""

    @property
    def environment(self) -> dict[str, str]:
        """What AWS's clients read."""
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def options(self) -> dict[str, Any]:
        """The same for an `ArtifactStore`."""
        named = {key.lower(): value for key, value in self.environment.items() if key != "AWS_ALLOW_HTTP"}
        return named | {"client_options": {"allow_http": True}}

    def fails(self) -> bool:
        """Whether this request is to be answered with 503."""
        self.failures -= 1
        found = self.failures >= 0 or time.monotonic() < self.fails_until
        self.failed += found
        return found


class BucketRequests(BaseHTTPRequestHandler):
    """Requests to a `FailingBucket`."""

    server: FailingBucket

    def _answer(self, code: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 08:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.fails():
            return self._answer(503)
        self.server.objects[self.path] = data
        return self._answer(200)

    def do_GET(self) -> None:
        if self.server.fails():
            return self._answer(503)
        if "list-type" in self.path and self.server.lists:
            return self._answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        found = self.server.objects.get(self.path)
        return self._answer(404) if found is None else self._answer(200, found)

    def do_HEAD(self) -> None:
        if self.server.fails():
            return self._answer(503)
        found = self.server.objects.get(self.path)
        return self._answer(404) if found is None else self._answer(200, length=len(found))

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


@contextmanager
def failing_bucket() -> Iterator[FailingBucket]:
    """A bucket that answers inside the block."""
    server = FailingBucket()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
