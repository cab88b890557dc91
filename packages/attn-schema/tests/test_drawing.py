"""What notebooks show of attention maps and completions holds the numbers and texts that they have."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from attn_schema import AttentionMap, Completion, FinishReason, Tensor, Usage

NASTY = "</script><b>"
WEIGHTS = np.array([[[1.0, 0.0, 0.0], [0.25, 0.75, 0.0]], [[0.5, 0.5, 0.0], [0.0, 0.1, 0.9]]], dtype="<f4")


@pytest.fixture
def drawn() -> AttentionMap:
    return AttentionMap(
        layer=3,
        mechanism="mha",
        heads=(0, 5),
        attention_weights=Tensor(shape=WEIGHTS.shape, data=WEIGHTS.tobytes()),
        query_tokens=("the", NASTY),
        key_tokens=("a", " b", "c"),
    )


def test_a_map_is_an_array_and_a_figure_with_a_panel_for_each_head(drawn: AttentionMap) -> None:
    assert np.array_equal(drawn.numpy(), WEIGHTS)
    panels = [axes for axes in drawn.plot().axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["head 0", "head 5"]
    assert np.array_equal(panels[1].images[0].get_array(), WEIGHTS[1])
    assert [label.get_text() for label in panels[0].get_xticklabels()] == ["a", "·b", "c"]
    assert len(repr(drawn)) < 120


def test_a_notebook_gets_every_head_as_an_image_of_its_weights(drawn: AttentionMap) -> None:
    from matplotlib.image import imread

    page = drawn._repr_html_()
    assert NASTY not in page
    ET.fromstring(f"<div>{page}</div>")  # noqa: S314 -- our own; well-formed: no token has become markup
    pictures = [imread(io.BytesIO(base64.b64decode(code))) for code in re.findall(r"base64,([^\"]+)", page)]
    for picture, weights in zip(pictures, (WEIGHTS.mean(0), *WEIGHTS), strict=True):
        assert picture.shape[:2] == weights.shape
        darkness = (1 - picture[..., 0]) / (1 - 6 / 255)
        assert darkness == pytest.approx(np.minimum(1, weights / weights[:, 1:].max(1).max()), abs=0.01)


def test_a_map_without_weights_or_with_too_many_is_named(drawn: AttentionMap) -> None:
    empty = drawn.replace(attention_weights=Tensor(shape=(2, 0, 3), data=b""), query_tokens=())
    wide = drawn.replace(attention_weights=Tensor(shape=(1, 2048, 2048), data=bytes(2048 * 2048 * 4)))
    for one in (empty, wide):
        assert "<img" not in one._repr_html_()
        assert "layer 3" in one._repr_html_()


def test_a_completion_shows_its_text_as_text() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=0)
    said = Completion(text=NASTY, tokens=(), finish_reason=FinishReason.STOP, usage=usage)
    assert NASTY not in said._repr_html_()
    assert NASTY in repr(said)
