"""The notebook of the documentation runs in Jupyter's kernel, and its cells show pictures, tables and a bar."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import site_pages

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "start" / "notebook.md"
STEPS = 30


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    book = nbformat.reads(site_pages.notebook(PAGE.read_text("utf-8")), 4)
    nbformat.validate(book)
    folder = tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in book.cells if cell.cell_type == "code"]


def shown(cell: Any, kind: str) -> str:
    """What a cell displays of a media type; the empty string if it displays none."""
    return "".join(output["data"].get(kind, "") for output in cell.outputs if "data" in output)


def test_what_is_looked_at_is_a_picture_or_a_table_and_readable_as_text(cells: list[Any]) -> None:
    costs, mechanism, mask, layer, *_, completion, weights, _, _ = cells
    for cell, element in ((costs, "<table>"), (mechanism, "<svg"), (mask, "<svg"), (layer, "<svg"), (weights, "<img")):
        assert element in shown(cell, "text/html")
        assert not re.search(r" at 0x|\\x", shown(cell, "text/plain"))
    assert shown(costs, "text/plain").count("\n") == 8, "four mechanisms at two lengths, below the heads"
    assert shown(mask, "text/plain").startswith("Causal() & Window(left=4")
    assert "<pre" in shown(completion, "text/html")


def test_training_draws_a_bar_and_a_map_is_an_array_and_a_figure(cells: list[Any]) -> None:
    training, figure = cells[5], cells[8]
    printed = "".join(output["text"] for output in training.outputs if output.output_type == "stream")
    assert f"{STEPS}/{STEPS}" in printed.split("\r")[-1]
    assert "(4, 19, 19)" in figure.outputs[0]["text"]
    assert shown(figure, "image/png")
