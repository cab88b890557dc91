"""The table of families in attn-models' README is that of the registry."""

from __future__ import annotations

import re

import model_families
from attn_models.adapters.families import FAMILIES


def rows():
    text = model_families.README.read_text("utf-8")
    table = text[text.index(model_families.BEGIN) : text.index(model_families.END)]
    return {
        found[1]: found
        for found in re.finditer(r"^\| `([^`]+)` \| (\w+) \| (\S*) *\| ([^|]+) \| [^|]+, \d+ \|$", table, re.M)
        if found[1] != "model_type"
    }


def test_the_table_names_every_family_of_the_registry_and_no_other():
    assert set(rows()) == {adapter.model_type for adapter in model_families.adapters()}


def test_the_table_names_the_architecture_of_every_gguf_file_that_is_read():
    assert {name: row[3] for name, row in rows().items() if row[3]} == model_families.GGUF


def test_every_measured_difference_is_small_and_every_described_family_is_measured():
    measured = {name: float(row[4]) for name, row in rows().items() if row[4][0].isdigit()}
    assert {adapter.model_type for adapter in FAMILIES} <= measured.keys()
    assert all(0 < apart < 1e-5 for apart in measured.values())
