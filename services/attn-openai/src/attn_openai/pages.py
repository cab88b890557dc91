"""The web pages: the files of attn-cli below /ui, and the data of the page of mechanisms that is no gRPC call."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from attn_cli.pages import assets
from attn_cli.pages.assets import HEADERS, INDEX
from attn_core.errors import DeadlineExceeded, InternalError, OutOfCapacity, UserError, starting
from attn_schema.methods import GET_MECHANISM, GetMechanismRequest
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from attn_openai.caller import HttpCaller
from attn_openai.catalogue import MechanismView

ROOT = "/ui/"
AT_ONCE = 2
"""The number of mechanisms whose data is computed at the same time; further requests wait."""
CHECK_SECONDS = 120.0
"""How long checking the laws of one mechanism may take."""
CHECK = "import os; getattr(os, 'nice', int)(10); from attn_cli.main import main; main()"

ReadBody = Callable[[Request], Awaitable[dict[str, Any]]]

PAGE_PATHS = {
    "GET /": "The web pages; need no token, but the data that they request does.",
    "GET /ui": "The same.",
    "GET /ui/{path:path}": "A file of the web pages.",
    "POST /ui/data/mechanism": "The data of a mechanism's page: facts, picture and cost curves.",
    "POST /ui/data/check": "The results of the conformance laws on a mechanism; needs attn-testing on the server.",
}
"""The method and path of each route of the pages, with its description."""


class Pages:
    """The endpoints of the pages; `read_body` reads the JSON object of a request within the server's limits."""

    def __init__(self, read_body: ReadBody) -> None:
        self._read_body = read_body
        self._computing = asyncio.Semaphore(AT_ONCE)
        self._checking = asyncio.Lock()

    async def home(self, _: Request) -> Response:
        """Redirect to the pages."""
        return RedirectResponse(ROOT, 307)

    async def file(self, request: Request) -> Response:
        """Return a file of the pages, or status 304 if the browser's copy is still valid."""
        asset = assets().get(request.path_params["path"] or INDEX)
        if asset is None:
            return Response("there is no such page; all are at /ui/", 404, {"content-type": "text/plain"})
        headers = {**HEADERS, "etag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.content, headers={**headers, "content-type": asset.media_type})

    async def mechanism(self, request: Request, caller: HttpCaller) -> Any:
        """Facts, picture and cost curves of a mechanism with options; raises `UserError` for an invalid request."""
        view = MechanismView.of(await self._read_body(request))
        await self._admit(caller, view.name)
        async with self._computing:
            return await asyncio.to_thread(view.facts)

    async def check(self, request: Request, caller: HttpCaller) -> Any:
        """The verdicts of the conformance kit, computed one mechanism at a time in a low-priority process."""
        view = MechanismView.of(await self._read_body(request))
        await self._admit(caller, view.name)
        if self._checking.locked():
            raise OutOfCapacity("the laws of another mechanism are being checked; try again in a moment")
        async with self._checking:
            return {"laws": await _laws(view.name, view.options)}

    @staticmethod
    async def _admit(caller: HttpCaller, name: str) -> None:
        """Admit callers that may read the catalogue, within their limits; raises `UnknownName` for an unknown name."""
        await caller.unary(GET_MECHANISM, GetMechanismRequest(name=name))


async def _laws(name: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = [f"--option={key}={msgspec.json.encode(value).decode()}" for key, value in options.items()]
    with starting("attn check"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHECK, "check", "--json", *given, "--", name,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        raise DeadlineExceeded(f"checking the laws of {name} takes more than {CHECK_SECONDS:g} seconds") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        found: list[dict[str, Any]] = msgspec.json.decode(out, type=list[dict[str, Any]])
    except msgspec.DecodeError:
        message = err.decode(errors="replace").strip()
        empty = InternalError(f"attn check {name} printed nothing")
        raise (UserError(message[-1000:]) if message else empty) from None
    return found
