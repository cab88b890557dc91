"""A prompt in pieces gives what it gives at once."""

from __future__ import annotations

import torch

from attn_testing.case import Case
from attn_testing.expect import require_same
from attn_testing.law import MechanismLaw
from attn_testing.laws.decode_equals_forward import silent_where_nothing_decodes
from attn_testing.serving import Serving

SPLITS = ((1, 4, 2, 5), (6, 6), (3, 1, 1, 7))


class ChunkedPrefill(MechanismLaw):
    """A prompt fed in chunks gives the rows of one prefill, and the same tokens after it."""

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case)

    def test_chunks_equal_one_prefill(self, case: Case) -> None:
        rows, source = case.rows(13), case.source(5)
        whole = feed(case, (12, 1), rows, source)
        for split in SPLITS:
            chunks = feed(case, (*split, 1), rows, source)
            require_same(chunks, whole, f"a prompt in chunks of {split} and at once", case.tolerance)


def feed(case: Case, lengths: tuple[int, ...], rows: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    """The outputs [tokens, width] of one request fed in steps of these lengths."""
    serving, out, start = Serving(case), [], 0
    serving.open(0, source)
    for length in lengths:
        out.append(serving.step({0: rows[start : start + length]})[0])
        start += length
    return torch.cat(out)
