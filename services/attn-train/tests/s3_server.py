"""A small server that speaks S3's protocol, with its objects in memory, for tests that need a bucket that fails.

What obstore asks of a bucket: objects put whole or in parts, read, listed with prefixes, and deleted. `answers` False
lets every request fail with 503 until it is True again.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

MODIFIED = "2026-11-23T08:00:00.000Z"


class Bucket(ThreadingHTTPServer):
    """Objects by name; `refused` counts requests that were answered by 503."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.answers = True
        self.refused = 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which an S3 client finds this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def bucket_server() -> Iterator[Bucket]:
    """A running server with one bucket, of any name."""
    server = Bucket()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        known = {"Content-Length": str(len(body)), "ETag": '"1"', "Last-Modified": "Mon, 23 Nov 2026 08:00:00 GMT"}
        for name, value in (known | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.server.answers:
            self.server.refused += 1
            self._answer(503)
            return
        parts = urlsplit(self.path)
        _, _, name = unquote(parts.path).lstrip("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        getattr(self, f"_{self.command.lower()}")(name, query, body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _do  # noqa: N815 - as the library calls them

    def _get(self, name: str, query: dict[str, str], _: bytes) -> None:
        if query.get("list-type") == "2":
            self._answer(200, self._listing(query))
        elif name not in self.server.objects:
            self._answer(404)
        else:
            data = self.server.objects[name]
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if asked is None:
                self._answer(200, data)
                return
            begin, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
            self._answer(206, data[begin : end + 1], **{"Content-Range": f"bytes {begin}-{end}/{len(data)}"})

    def _head(self, name: str, _: Any, __: bytes) -> None:
        found = self.server.objects.get(name)
        self._answer(404) if found is None else self._answer(200, found)

    def _put(self, name: str, query: dict[str, str], body: bytes) -> None:
        if "partNumber" in query:
            self.server.parts[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.server.objects[name] = body
        self._answer(200)

    def _delete(self, name: str, _: Any, __: bytes) -> None:
        self.server.objects.pop(name, None)
        self._answer(204)

    def _post(self, name: str, query: dict[str, str], body: bytes) -> None:
        if "delete" in query:
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in keys:
                self.server.objects.pop(unescape(key), None)
            self._answer(200, _xml("DeleteResult", "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)))
        elif "uploads" in query:
            upload = str(len(self.server.parts))
            self.server.parts[upload] = {}
            text = f"<Bucket>b</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
            self._answer(200, _xml("InitiateMultipartUploadResult", text))
        else:
            found = self.server.parts.pop(query["uploadId"])
            self.server.objects[name] = b"".join(found[number] for number in sorted(found))
            text = f"<Bucket>b</Bucket><Key>{escape(name)}</Key><ETag>1</ETag>"
            self._answer(200, _xml("CompleteMultipartUploadResult", text))

    def _listing(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        entries, folders = [], set()
        for name, data in sorted(self.server.objects.items()):
            if not name.startswith(prefix):
                continue
            inner = name[len(prefix) :]
            if delimiter and delimiter in inner:
                folders.add(prefix + inner.partition(delimiter)[0] + delimiter)
                continue
            entries.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{MODIFIED}</LastModified><ETag>1</ETag>"
                f"<Size>{len(data)}</Size></Contents>"
            )
        common = [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)]
        return _xml("ListBucketResult", "<IsTruncated>false</IsTruncated>" + "".join(entries + common))

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


def _xml(kind: str, text: str) -> bytes:
    return f'<?xml version="1.0"?><{kind}>{text}</{kind}>'.encode()
