"""Numbers as people read them."""

from __future__ import annotations

from attn_cli.output import human_bytes, human_count


def test_bytes_and_counts_are_decimal() -> None:
    assert human_bytes(2621440000) == "2.62 GB"
    assert human_bytes(999) == "999 B"
    assert human_count(1500) == "1.50 k"
