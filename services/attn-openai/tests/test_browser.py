"""The pages in Chromium, against a real server: what is shown, what keys do, and that nothing is refused or missing.

Needs Chromium (Debian's package `chromium`, or ATTN_CHROMIUM); without it these tests are skipped, and test_pages.py
and attn-cli's tests still read every file and every answer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_gateway import Cluster, ClusterSettings, Gateway, GatewaySettings, serving
from attn_gateway.catalog import CatalogService
from attn_openai.server import UvicornServer
from attn_train.service import TrainingGrpc
from attn_train.settings import TrainSettings

playwright = pytest.importorskip("playwright.async_api")
CHROMIUM = os.environ.get("ATTN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.timeout(300),
]
PATIENT = 120_000
"""Milliseconds to wait for what a slow machine does at last."""
DRAWN = {
    "ui/#/explorer/tiny": ".matrix canvas",
    "ui/#/playground/tiny": "main textarea",
    "ui/#/mechanisms/sliding_window": ".uplot >> nth=1",
    "ui/#/jobs": ".events li:has-text('loss')",
    "ui/#/models": "h2:has-text('tiny-bert')",
    "docs": "summary",
}
"""The pages, and what is there when they have drawn themselves."""
GROUND_AND_WORDS = "(({ backgroundColor, color }) => [backgroundColor, color])(getComputedStyle(document.body))"
PICTURES = Path(os.environ["ATTN_PICTURES"]) if "ATTN_PICTURES" in os.environ else None
"""A folder for a picture of each page, if wanted."""
MATHS = """async (layers) => {
  const maps = await import('/ui/maps.js');
  const made = layers.map((weights) => ({ rows: 4, cols: 4, heads: [0, 1], weights: Float32Array.from(weights) }));
  const [one, other] = [maps.headOf(made[0], 0), maps.headOf(made[0], 1)];
  const flow = Array.from(maps.rollout(made).values);
  return { flow, apart: maps.totalVariation(one, other), spread: maps.entropy(one) };
}"""


@pytest.fixture
async def page(url: str) -> AsyncIterator[Any]:
    """A page of a desktop's width; an error in it, or in what it loads, fails the test."""
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = await browser.new_page(viewport={"width": 1280, "height": 900})
        opened.set_default_timeout(PATIENT)
        wrong: list[str] = []
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        opened.on("request", lambda request: None if request.url.startswith(url) else wrong.append(request.url))
        yield opened
        await browser.close()
        # What the server refuses the page says itself; Chromium adds a line with the status.
        refused = re.compile(r"Failed to load resource: the server responded with a status of 40[04] .*")
        assert [message for message in wrong if not refused.fullmatch(message)] == []


@pytest.fixture
async def gateway(inference: Any, tmp_path: Path) -> AsyncIterator[Gateway]:
    """The services of conftest.py and training, whose home is this test's own."""
    training = TrainingGrpc(Cluster(ClusterSettings(home=tmp_path)), TrainSettings(data_roots=(tmp_path,)))
    settings = GatewaySettings(port=0, http_port=0)
    services = [inference, CatalogService(), training]
    async with serving(services, settings, http=UvicornServer(), shutdown_timeout=30.0) as running:
        yield running


def lightness(colour: str) -> float:
    """The mean of the red, green and blue of `rgb(1, 2, 3)`."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


async def start_job(page: Any, url: str, folder: Path, name: str) -> None:
    """A job of more steps than a test waits for."""
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    config = {
        "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 8, "mechanism": "mha"},
        "data": {"dataset": str(folder / "text.txt")},
        "optimizer": {"steps": 1_000_000, "batch_size": 2, "warmup_steps": 2},
        "evaluation": {"logging_steps": 5},
    }
    path = f"{url}/attn.v1.TrainingService/SubmitTrainingJob"
    answer = await page.request.post(path, data={"job_id": name, "config": config})
    assert answer.ok, await answer.text()


async def fits(page: Any) -> bool:
    """Whether nothing is wider than the window, at the latest when the page has drawn itself anew after a change."""
    for _ in range(200):
        if await page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_the_explorer_shows_heads_lines_cells_and_shares(page: Any, url: str) -> None:
    await page.goto(f"{url}/ui/#/explorer/tiny")
    await page.fill("textarea >> nth=0", "to be or not")
    await page.check("main input[type=checkbox]")
    await page.click("main form button.primary")
    await page.click("button[aria-label='layer 1, head 2']")
    assert await page.inner_text(".matrix figcaption >> nth=0") == "tiny, layer 1, head 2"
    await page.locator("button[aria-label='layer 1, head 2']").press("ArrowLeft")
    assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 1, head 1"
    canvas = page.locator(".matrix canvas >> nth=0")
    await canvas.focus()
    await canvas.press("ArrowDown")
    assert (await page.inner_text(".matrix .readout >> nth=0")).endswith(" 1")  # the first token sees itself alone
    await page.click(".lines [data-row='2']")
    assert await page.get_attribute(".lines [data-row='2']", "aria-pressed") == "true"
    await page.click(".lines [data-row='3']")
    heads = await page.locator(".shares thead th").all_inner_texts()
    assert heads[:4] == ["key", "this head", "mean of the layer", "rollout"]
    before = await page.get_attribute(".matrix canvas >> nth=0", "aria-label")
    await page.click("button[aria-label='Zoom in']")
    assert await page.get_attribute(".matrix canvas >> nth=0", "aria-label") != before
    await page.click("button[aria-label='Show all tokens']")
    assert await page.get_attribute(".matrix canvas >> nth=0", "aria-label") == before
    await page.set_viewport_size({"width": 390, "height": 844})
    assert await fits(page)


async def test_rollout_and_distances_are_those_of_torch(page: Any, url: str) -> None:
    await page.goto(f"{url}/ui/")
    torch.manual_seed(5)
    layers = torch.rand(3, 2, 4, 4).tril().softmax(-1)
    found = await page.evaluate(MATHS, layers.reshape(3, -1).tolist())
    flow = torch.eye(4)
    for layer in layers:
        mixed = (layer.mean(0) + torch.eye(4)) / 2
        flow = mixed / mixed.sum(-1, keepdim=True) @ flow
    assert torch.tensor(found["flow"]) == pytest.approx(flow.flatten(), abs=1e-6)
    assert found["apart"] == pytest.approx(float((layers[0, 0] - layers[0, 1]).abs().sum() / 8), abs=1e-6)
    spread = torch.distributions.Categorical(probs=layers[0, 0]).entropy().mean()
    assert found["spread"] == pytest.approx(float(spread), abs=1e-5)


async def test_an_answer_streams_shows_probabilities_and_can_be_stopped(page: Any, url: str) -> None:
    await page.goto(f"{url}/ui/#/playground/tiny")
    await page.fill("main input[type=number] >> nth=0", "12")
    await page.fill("main textarea", "<img src=x onerror=alert(1)>")
    await page.locator("main textarea").press("Enter")
    await page.wait_for_selector(".after:has-text('ended')")
    assert await page.inner_text(".turn.user .said") == "<img src=x onerror=alert(1)>"
    assert await page.locator("main img").count() == 0
    await page.locator(".turn.assistant .piece >> nth=0").focus()
    assert "%" in await page.inner_text(".tip")
    await page.fill("main input[type=number] >> nth=0", "900")
    await page.fill("main textarea", "go on")
    # Both clicks in one go: on a slow machine the answer could be whole before a second call comes.
    await page.evaluate(
        "for (const name of ['primary', 'danger']) document.querySelector(`main button.${name}`).click()"
    )
    await page.wait_for_selector("main button.primary:enabled")
    assert await page.locator(".turn.assistant").count() == 1
    assert await page.input_value("main textarea") == "go on"


async def test_what_no_model_can_answer_is_neither_offered_nor_sent(page: Any, url: str) -> None:
    await page.goto(f"{url}/ui/#/playground/tiny-bert")
    await page.wait_for_selector(".notice.error:has-text('tiny-bert')")
    assert await page.locator("main select option").all_inner_texts() == ["tiny"]
    await page.get_by_label("Temperature").fill("9")
    await page.fill("main textarea", "go on")
    await page.locator("main textarea").press("Enter")
    assert await page.evaluate("document.activeElement.matches(':invalid')")
    assert await page.locator(".turn").count() == 0
    await page.goto(f"{url}/ui/#/explorer/tiny-bert")
    await page.wait_for_selector("h1:text-is('Attention')")
    await page.fill("main textarea >> nth=0", "abcd")
    await page.click("main form button.primary")
    await page.wait_for_selector(".matrix canvas")


@pytest.mark.parametrize("address", ["nonsense", "mechanisms/%", "constructor"])
async def test_an_address_that_is_no_pages_is_named(page: Any, url: str, address: str) -> None:
    await page.goto(f"{url}/ui/#/{address}")
    assert address in await page.inner_text(".notice.error")


async def test_a_mechanism_is_drawn_again_when_an_option_changes(page: Any, url: str) -> None:
    await page.goto(f"{url}/ui/#/mechanisms/sliding_window")
    await page.wait_for_selector(".uplot >> nth=1")
    assert await page.locator(".equation math").count() >= 1
    window = page.get_by_label("window", exact=True)
    await window.fill("7")
    await page.wait_for_selector("figcaption:has-text('window=7')")
    await window.fill("0")
    await page.wait_for_selector(".notice.error:has-text('window')")
    await page.set_viewport_size({"width": 390, "height": 844})
    assert await fits(page)


async def test_models_are_listed_and_a_token_stays_in_memory(page: Any, url: str) -> None:
    await page.goto(f"{url}/ui/#/models")
    await page.wait_for_selector("h2:has-text('tiny-bert')")
    assert await page.locator("dt:has-text('processes')").count() >= 1
    await page.click("text=Theme: system")
    assert await page.evaluate("document.documentElement.dataset.theme") == "light"
    await page.click("button:text-is('Token')")
    await page.fill("dialog input", "secret-token")
    await page.click("dialog button.primary")
    await page.wait_for_selector("button:text-is('Token ✓')")
    stored = await page.evaluate("JSON.stringify([localStorage, sessionStorage]) + document.cookie + location.href")
    assert "secret" not in stored


async def test_a_job_is_cancelled_and_resumed_and_its_curve_grows(page: Any, url: str, tmp_path: Path) -> None:
    await start_job(page, url, tmp_path, "one")
    await page.goto(f"{url}/ui/#/jobs")
    await page.wait_for_selector(".events li:has-text('loss')")
    await page.wait_for_selector(".uplot")
    await page.click("button[data-key='CancelTrainingJob one']")
    resume = await page.wait_for_selector("button[data-key='ResumeTrainingJob one']")
    assert await page.locator("tr:has(th:text-is('one')) td:text-is('cancelled')").count() == 1
    await resume.click()
    await page.wait_for_selector("button[data-key='CancelTrainingJob one']")
    await page.wait_for_selector(".events li:has-text('cancelled → ')")
    await page.uncheck("input[aria-label='curve of one']")
    await page.wait_for_selector(".events:not(:has(li))", state="attached")
    await page.click("button[data-key='CancelTrainingJob one']")
    await page.wait_for_selector("button[data-key='ResumeTrainingJob one']")


async def test_curves_of_files_are_drawn_beside_those_of_jobs(page: Any, url: str, tmp_path: Path) -> None:
    await start_job(page, url, tmp_path, "three")
    await page.goto(f"{url}/ui/#/jobs/three")
    await page.wait_for_selector(".events li:has-text('loss')")
    theirs, table, broken = tmp_path / "trainer_state.json", tmp_path / "a.csv", tmp_path / "b.json"
    rows = '{"step": 1, "loss": 3.0, "grad_norm": NaN}, {"step": 2, "eval_loss": 2.5}, {"step": 3, "loss": 1.25}'
    theirs.write_text(f'{{"log_history": [{rows}]}}')
    table.write_text("step,loss\r\n1,0.75\r\n")
    broken.write_text("[]")
    await page.get_by_label("Beside runs of files").set_input_files([theirs, table, broken])
    chart = page.locator(".chart[aria-label*='a.csv 0.75']")
    await chart.wait_for(timeout=PATIENT)
    label = await chart.get_attribute("aria-label")
    assert "trainer_state.json 1.25" in label
    assert "three " in label
    await page.wait_for_selector(".notice.error:has-text('b.json')")
    await page.get_by_label("Metric").select_option("validation_loss")
    await page.wait_for_selector(".chart[aria-label*='trainer_state.json 2.5']")


async def test_a_model_is_loaded_gets_engines_and_is_unloaded(page: Any, url: str) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    await page.goto(f"{url}/ui/#/models")
    await page.get_by_label("Name").fill("second")
    await page.get_by_label("Source").fill("nothing-here")
    load = page.locator("main form button.primary")
    await load.click()
    await page.wait_for_selector(".notice.error:has-text('nothing-here')")
    await page.get_by_label("Source").fill("tiny")
    await load.click()
    card = page.locator("section.card:has(h2:text-is('second'))")
    await card.locator("dd:has-text('serving')").wait_for()
    await card.get_by_label("engines of second").fill("2")
    await card.get_by_text("Set engines").click()
    await page.wait_for_selector(".notice:has-text('ScaleModel second: done.')")
    await card.get_by_role("button", name="Unload").click()
    await page.wait_for_selector(".notice:has-text('UnloadModel second: done.')")
    await card.wait_for(state="detached")
    assert await page.locator("h2:text-is('tiny')").count() == 1


async def test_every_page_fits_in_light_and_dark_on_a_desk_and_on_a_phone(page: Any, url: str, tmp_path: Path) -> None:
    await start_job(page, url, tmp_path, "one")
    for theme, width in itertools.product(("light", "dark"), (1280, 390)):
        await page.set_viewport_size({"width": width, "height": 844})
        await page.emulate_media(color_scheme=theme)
        for name, drawn in DRAWN.items():
            await page.goto(f"{url}/{name}")
            await page.wait_for_selector(drawn)
            assert await fits(page), name
            ground, words = await page.evaluate(GROUND_AND_WORDS)
            assert (lightness(ground) > lightness(words)) == (theme == "light"), name
            if PICTURES is not None:
                picture = PICTURES / f"{re.sub(r'[^a-z]+', '-', name)}-{theme}-{width}.png"
                await page.screenshot(path=picture, full_page=True)


async def test_the_single_file_needs_no_server(page: Any, url: str, tmp_path: Path) -> None:
    from attn_cli.pages import explore
    from attn_schema import AttentionMap, Tensor

    tokens = ("<b>", "b")
    weights = torch.tensor([[[1.0, 0.0], [0.25, 0.75]]])
    tensor = Tensor(shape=(1, 2, 2), data=weights.numpy().tobytes())
    drawn = AttentionMap(
        layer=0, mechanism="mha", heads=(0,), attention_weights=tensor, query_tokens=tokens, key_tokens=tokens
    )
    file = explore([drawn], [drawn], label="one", other_label="two").save(tmp_path / "map.html")
    await page.set_content(file.read_text("utf-8"))
    await page.wait_for_selector(".matrix canvas >> nth=2")
    assert "differ by 0" in await page.inner_text(".facts")
    assert await page.locator(".shares td:has-text('0.75')").count() >= 1
    del url
