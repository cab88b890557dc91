"""The pages over HTTP: their files and headers, and the data that they ask for."""

from __future__ import annotations

import sys
import time
from typing import Any

import httpx2
import pytest
from attn_cli.pages import assets
from attn_cli.pages.assets import CONTENT_SECURITY_POLICY
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_core.masks import Fixed, Strided
from attn_gateway import GatewaySettings
from attn_openai import catalogue
from attn_openai.catalogue import MechanismView

TOKEN = "a-token-of-sixteen-or-more"


async def mechanism(http: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await http.post("/ui/data/mechanism", json=body)


async def test_every_file_is_served_with_its_type_and_a_policy_and_once(http: httpx2.AsyncClient) -> None:
    for path, asset in assets().items():
        answer = await http.get(f"/ui/{path}")
        assert (answer.status_code, answer.content) == (200, asset.content)
        assert answer.headers["content-type"] == asset.media_type
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        again = await http.get(f"/ui/{path}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert (await http.get("/ui/../app.py")).status_code == 404
    assert (await http.get("/ui/no-such.js")).status_code == 404


async def test_the_root_leads_to_the_pages(http: httpx2.AsyncClient) -> None:
    for path in ("/", "/ui"):
        answer = await http.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, "/ui/")
    assert "<title>attn</title>" in (await http.get("/ui/")).text


async def test_the_mask_of_a_window_follows_its_option(http: httpx2.AsyncClient) -> None:
    for window in (2, 5):
        found = (await mechanism(http, name="sliding_window", options={"window": window})).json()
        grid = found["picture"]["grid"]
        expected = [[float(0 <= query - key < window) for key in range(len(grid))] for query in range(len(grid))]
        assert grid == expected
        assert found["state_bytes"] == 2 * 512 * window * 4  # keys and values of as many tokens, float32
        assert f"window={window}" in found["picture"]["caption"]
    assert found["mathml"][0].startswith("<math")
    assert found["paper_url"] == "https://arxiv.org/abs/2004.05150"


async def test_curves_of_compared_mechanisms_lie_beside(http: httpx2.AsyncClient) -> None:
    found = (await mechanism(http, name="mha", compare=["linear", "mha"])).json()
    assert [curve["name"] for curve in found["curves"]] == ["mha", "linear"]
    grows, stays = (curve["state_bytes"] for curve in found["curves"])
    assert grows[1] == 2 * grows[0]
    assert stays[1] == stays[0]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"name": "sliding_windo"}, 404, "did you mean"),
        ({"name": "--help"}, 400, "name"),
        ({"name": "mha", "heads": 2}, 400, "field"),
        ({"name": "sliding_window", "options": {"window": 0}}, 400, "window"),
        ({"name": "sliding_window", "options": {"window": 10**9}}, 400, "options.window"),
        ({"name": "sliding_window", "options": {"windw": 1}}, 400, "did you mean"),
        ({"name": "mha", "num_heads": 7}, 400, "num_heads"),
        ({"name": "mha", "seq": True}, 400, "seq"),
        ({"name": "mha", "hidden_size": 2**30}, 400, "hidden_size"),
        ({"name": "mha", "compare": "linear"}, 400, "compare"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx2.AsyncClient, body: dict[str, Any], status: int, word: str) -> None:
    answer = await mechanism(http, **body)
    assert answer.status_code == status, answer.text
    assert word in answer.text


@pytest.mark.parametrize("settings", [GatewaySettings(port=0, http_port=0, token=TOKEN)])
async def test_files_need_no_token_and_data_does(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/ui/app.js")).status_code == 200
    for path in ("mechanism", "check"):
        assert (await http.post(f"/ui/data/{path}", json={"name": "mha"})).status_code == 401
    known = {"authorization": f"Bearer {TOKEN}"}
    assert (await http.post("/ui/data/mechanism", json={"name": "mha"}, headers=known)).status_code == 200


@pytest.mark.slow
async def test_the_laws_are_tried_in_a_process_of_their_own(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/ui/data/check", json={"name": "mha"}, timeout=180)
    laws = answer.json()["laws"]
    assert {law["verdict"] for law in laws} <= {"kept", "not asked"}
    assert sum(law["verdict"] == "kept" for law in laws) > 5


def test_a_length_whose_pairs_take_long_to_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "CURVE_SECONDS", 0.0)
    most = catalogue.ALWAYS_PRICED
    found = MechanismView.of({"name": "sliding_window", "seq": most}).facts()
    assert found["tokens"] == most
    assert found["curves"][0]["tokens"] == catalogue.CURVE[:2]
    with pytest.raises(InvalidValue, match=f"at most {most}") as error:
        MechanismView.of({"name": "sliding_window", "seq": most + 1}).facts()
    assert error.value.metadata["field"] == "seq"


@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_pairs_of_patterns_are_counted_and_not_listed(name: str) -> None:
    mask = Strided(2) if name == "strided" else Fixed(block=8, summaries=1)
    calls = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        mask.count(10_000, 10_000)
    finally:
        sys.setprofile(None)
    assert calls < 20 * 10_000  # the pairs are some ten million


def test_mechanisms_of_a_mask_can_be_shown() -> None:
    for name in installed().mechanisms.names()[::6]:
        view = MechanismView.of({"name": name})
        found = installed().mechanisms.get(name)
        config = view.sizes.config(found, dict(found.sketch)) if found.can("causal") else None
        if config is None or found.spec(config) is None:
            continue
        assert len(view.facts()["picture"]["grid"]) > 1, name


@pytest.mark.parametrize("name", installed().mechanisms.names())
def test_every_mechanism_is_drawn_at_sizes_that_do_not_follow_the_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "DRAWING_SECONDS", 10 * catalogue.DRAWING_SECONDS)  # on any machine
    large = {"hidden_size": catalogue.MOST["hidden_size"], "num_heads": 64}
    view = MechanismView.of({"name": name, **large})
    mechanism = installed().mechanisms.get(name)
    began = time.thread_time()
    picture = view._picture(mechanism)
    assert len(picture["grid"]) == catalogue.POSITIONS, picture["caption"]
    assert time.thread_time() - began < 10 * catalogue.DRAWING_SECONDS


def test_a_layer_that_takes_longer_is_not_drawn_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ntm = installed().mechanisms.get("ntm")
    for bound, word in (("DRAWING_SECONDS", "seconds"), ("DRAWING_ELEMENTS", "elements")):
        with monkeypatch.context() as patched:
            patched.setattr(catalogue, bound, 0)
            picture = MechanismView.of({"name": "ntm"})._picture(ntm)
        assert picture["grid"] == []
        assert f"more than 0 {word}" in picture["caption"]


async def test_an_option_that_makes_a_layer_huge_is_answered_without_a_picture(http: httpx2.AsyncClient) -> None:
    found = (await mechanism(http, name="ntm", options={"slots": catalogue.MOST_OPTION})).json()
    assert found["picture"]["grid"] == []
    assert "no picture" in found["picture"]["caption"]
    assert found["parameters"] > 0
