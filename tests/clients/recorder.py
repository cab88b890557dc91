"""A proxy that keeps the requests that pass through it."""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

KEPT_HEADERS = ("content-type", "accept", "anthropic-version", "anthropic-beta", "x-stainless-lang")
"""Headers that may change what is answered, or say which client it is."""


class Recorder:
    """Listens at `url` and passes requests on to `target`; `requests` are those so far, with the status of each."""

    def __init__(self, target: str) -> None:
        self.requests: list[dict[str, Any]] = []
        requests, address = self.requests, urlsplit(target).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                upstream = http.client.HTTPConnection(address, timeout=60)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                upstream.request(self.command, self.path, body, headers)
                answer = upstream.getresponse()
                kept = {name: value for name in KEPT_HEADERS if (value := self.headers.get(name)) is not None}
                row = {"method": self.command, "path": self.path, "headers": kept, "status": answer.status}
                requests.append(row | ({"body": json.loads(body)} if body else {}))
                self.send_response(answer.status)
                content = answer.read()
                for name in ("content-type", "retry-after", "x-should-retry"):
                    if value := answer.headers.get(name):
                        self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_HEAD = do_POST  # noqa: N815 - as the library calls them

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
