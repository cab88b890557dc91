"""The files of the pages: whole, self-contained, and free of what could run a stranger's text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
from attn_cli.pages import AttentionPage, assets, explore
from attn_cli.pages.assets import CONTENT_SECURITY_POLICY
from attn_cli.pages.explorer import MODULES, bundle
from attn_core.errors import InvalidValue
from attn_schema import AttentionMap, Tensor

NASTY = "</script><img src=x onerror=alert(1)>"


def attention_map(tokens: tuple[str, ...] = ("a", "b"), layer: int = 0) -> AttentionMap:
    count = len(tokens)
    weights = [1.0 / (row + 1) if col <= row else 0.0 for row in range(count) for col in range(count)]
    data = struct.pack(f"<{len(weights)}f", *weights)
    tensor = Tensor(shape=(1, count, count), data=data)
    return AttentionMap(
        layer=layer, mechanism="mha", heads=(0,), attention_weights=tensor, query_tokens=tokens, key_tokens=tokens
    )


class Page(HTMLParser):
    """The elements of a page with their texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self.found:
            self.texts[self.found[-1][0]][-1] += data


def test_every_file_is_reached_from_the_first_page_and_every_reference_leads_to_a_file() -> None:
    reached, todo = set(), ["index.html"]
    while todo:
        path = todo.pop()
        if path in reached:
            continue
        assert path in assets(), path
        reached.add(path)
        text = "" if path.endswith(".woff2") else assets()[path].text
        found = re.findall(r'(?:src|href)="([^"#:]+)"', text) if path.endswith(".html") else []
        if path.endswith(".css"):
            found = [f"{path.rpartition('/')[0]}/{name}" for name in re.findall(r'url\("([^"]+)"\)', text)]
        if path.endswith(".js") and "vendor" not in path:
            found = re.findall(r'from "\./([^"]+)"', text) + re.findall(r'"\./(page-[^"]+)"', text)
            found += re.findall(r'new URL\("([^"]+)"', text)
        todo += found
    spared = {"standalone.js", "vendor/uPlot.LICENSE.txt", "vendor/math.LICENSE.txt"}
    assert set(assets()) - reached == spared


def test_nothing_is_loaded_from_other_hosts_or_set_as_markup() -> None:
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|javascript:")
    for path, asset in assets().items():
        if path.startswith("vendor/") or not path.endswith((".js", ".html", ".css")):
            continue
        assert not forbidden.search(asset.text), path
        named = set(re.findall(r"https?://[\w./-]+", asset.text))
        assert named <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}, path
    for tag, attributes in Page(assets()["index.html"].text).found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        assert tag != "style"
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_text_and_lines_have_a_contrast_of_four_and_a_half_in_both_themes() -> None:
    colours = dict(re.findall(r"--(\w[\w-]*): light-dark\((#\w{6}, #\w{6})\)", assets()["style.css"].text))
    for theme in (0, 1):
        shade = {name: both.split(", ")[theme] for name, both in colours.items()}
        for text in ("text", "muted", "accent", "error", "good", "negative"):
            for ground in ("page", "card"):
                assert contrast(shade[text], shade[ground]) >= 4.5, (text, ground, theme)
        assert contrast(shade["on-accent"], shade["accent"]) >= 4.5
        assert contrast(shade["text"], shade["soft"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """The contrast of WCAG 2.2."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_bundle_has_no_module_left_and_no_name_twice() -> None:
    text = bundle()
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", text, re.MULTILINE)
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert set(MODULES) <= set(assets())


def test_one_file_has_the_weights_and_admits_its_own_script_alone() -> None:
    page = Page(AttentionPage([("mine", [attention_map()])]).html())
    policy = next(attributes["content"] for tag, attributes in page.found if "http-equiv" in attributes) or ""
    for kind, text in (
        ("script", page.texts["script"][1].rstrip("\n")),
        ("style", page.texts["style"][0].rstrip("\n")),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not any(name in attributes for _, attributes in page.found for name in ("src", "href"))
    (layer,) = json.loads(page.texts["script"][0])["views"][0]["layers"]
    assert struct.unpack("<4f", base64.b64decode(layer["attention_weights"]["data"])) == (1.0, 0.0, 0.5, 0.5)


def test_tokens_and_names_that_look_like_markup_stay_text() -> None:
    view = explore([attention_map((NASTY, "b"))], label=NASTY)
    page = Page(view.html())
    assert [tag for tag, _ in page.found].count("script") == 2
    assert not any(tag == "img" for tag, _ in page.found)
    assert json.loads(page.texts["script"][0])["views"][0]["layers"][0]["key_tokens"] == [NASTY, "b"]
    frame = Page(view._repr_html_())
    ((tag, attributes),) = frame.found
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts allow-downloads")
    assert attributes["srcdoc"] == view.html()


def test_a_file_is_written_or_the_reason_said(tmp_path: Path) -> None:
    target = explore([attention_map()]).save(tmp_path / "map.html")
    assert target.read_text("utf-8").startswith("<!doctype html>")
    with pytest.raises(InvalidValue, match="a file that can be written"):
        explore([attention_map()]).save(tmp_path / "missing" / "map.html")


def test_no_maps_or_too_many_weights_are_refused() -> None:
    with pytest.raises(InvalidValue, match="at least one layer"):
        explore([])
    wide = Tensor(shape=(1, 4096, 4096), data=bytes(4096 * 4096 * 4))
    tokens = ("a",) * 4096
    large = AttentionMap(
        layer=0, mechanism="mha", heads=(0,), attention_weights=wide, query_tokens=tokens, key_tokens=tokens
    )
    with pytest.raises(InvalidValue, match="choose layers or heads"):
        explore([large, large])
