"""The server as others meet it: over TLS, and under the load of `attn bench`."""

from __future__ import annotations

import math
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest
from attn_cli.serving_load import AttnBackend, LoadRequest, OpenAIBackend, arrivals, run_requests
from attn_client import ClientSettings
from attn_core.errors import UserError
from attn_gateway import Gateway, GatewaySettings, TlsFiles, serving
from attn_openai.server import UvicornServer


async def test_with_a_certificate_http_is_https_and_nothing_else(inference: Any, certificate: TlsFiles) -> None:
    server = UvicornServer()
    settings = GatewaySettings(port=0, http_port=0, host="127.0.0.1", token="one", tls=certificate)
    async with serving([inference], settings, http=server):
        port = server.address.rsplit(":", 1)[1]
        trust = ssl.create_default_context(cafile=str(certificate.certificate))
        async with httpx2.AsyncClient(verify=trust) as http:
            headers = {"authorization": "Bearer one"}
            assert (await http.get(f"https://localhost:{port}/v1/models", headers=headers)).status_code == 200
        async with httpx2.AsyncClient() as http:
            with pytest.raises(httpx2.TransportError):
                await http.get(f"http://localhost:{port}/v1/models")


async def test_a_certificate_that_cannot_be_used_is_named(inference: Any, tmp_path: Path) -> None:
    files = TlsFiles(certificate=tmp_path / "none.pem", key=tmp_path / "none.key")
    with pytest.raises(UserError, match="tls_"):
        async with serving([inference], GatewaySettings(port=0, http_port=0, tls=files), http=UvicornServer()):
            pass


@pytest.mark.parametrize("chat", [False, True])
async def test_bench_counts_the_same_tokens_over_http_as_over_grpc(gateway: Gateway, url: str, chat: bool) -> None:
    requests = [LoadRequest("to be", 5), LoadRequest("or not", 7)]
    sent = arrivals(2, math.inf, 1.0, 0)
    async with OpenAIBackend(url, "tiny", chat=chat, ignore_eos=True, token=None) as backend:
        found, _ = await run_requests(backend, requests, sent)
    assert [times.error for times in found] == ["", ""]
    assert [times.output_tokens for times in found] == [5, 7]
    assert all(times.ttft is not None and times.ttft <= times.e2el for times in found)
    if not chat:
        async with AttnBackend(ClientSettings(address=gateway.address), "tiny", ignore_eos=True) as direct:
            same, _ = await run_requests(direct, requests, arrivals(2, math.inf, 1.0, 0))
        assert [times.prompt_tokens for times in same] == [times.prompt_tokens for times in found]


async def test_bench_counts_what_a_server_refuses_as_failed(url: str) -> None:
    async with OpenAIBackend(url, "tinny", chat=True, ignore_eos=False, token=None) as backend:
        (times,), _ = await run_requests(backend, [LoadRequest("a", 1)], arrivals(1, math.inf, 1.0, 0))
    assert "did you mean 'tiny'" in times.error
    async with OpenAIBackend("http://127.0.0.1:9", "tiny", chat=True, ignore_eos=False, token=None) as backend:
        (times,), _ = await run_requests(backend, [LoadRequest("a", 1)], arrivals(1, math.inf, 1.0, 0))
    assert times.error.startswith("Unavailable")
