"""The reference page of options is what the declarations say."""

from __future__ import annotations

from pathlib import Path

from attn_schema import EngineConfig, fields_of
from attn_schema.reference import page, reference

PAGE = Path(__file__).parents[3] / "docs" / "options.md"


def test_the_page_in_docs_is_current() -> None:
    again = "run: python -m attn_schema.reference > docs/options.md"
    assert PAGE.read_text("utf-8") == page(), again


def test_the_reference_lists_every_field() -> None:
    text = reference([EngineConfig])
    assert "| `kv_cache` | str | `attn-cache/shared` |" in text
    assert text.count("\n| `") == len(fields_of(EngineConfig))
