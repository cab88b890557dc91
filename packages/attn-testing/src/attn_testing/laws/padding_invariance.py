"""What a padded key holds, and how many there are, changes nothing."""

from __future__ import annotations

from typing import ClassVar

import torch
from attn_core import Capability
from torch import Tensor

from attn_testing.case import Case
from attn_testing.expect import require_same
from attn_testing.law import MechanismLaw

TOKENS, PADDED = 5, 8


class PaddingInvariance(MechanismLaw):
    """Padding at the end changes no real output, and the content of padding anywhere is never seen."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.PADDING,)

    def test_padding_at_the_end_changes_nothing(self, case: Case) -> None:
        query, source, key_padding_mask = padded_batch(case)
        with torch.no_grad():
            together = case.attend(query, source, key_padding_mask)
            for row, length in enumerate((PADDED, TOKENS)):
                one = query[row : row + 1] if case.cross else query[row : row + 1, :length]
                alone = case.attend(one, None if source is None else source[row : row + 1, :length])
                what = f"a sequence of {length} padded to {PADDED} and alone"
                require_same(together[row : row + 1, : one.shape[1]], alone, what, 1e-10)

    def test_the_content_of_padding_is_never_seen(self, case: Case) -> None:
        key_padding_mask = torch.tensor([[True, True, False, True, True, False, False, True]])
        query, source = case.rows(1, PADDED), case.source(1, PADDED)
        rubbish = 100 * case.rows(1, PADDED, seed=4)
        with torch.no_grad():
            before = case.attend(query, source, key_padding_mask)
            if source is None:
                after = case.attend(torch.where(key_padding_mask[..., None], query, rubbish), None, key_padding_mask)
            else:
                after = case.attend(query, torch.where(key_padding_mask[..., None], source, rubbish), key_padding_mask)
        real = torch.ones_like(key_padding_mask) if case.cross else key_padding_mask
        require_same(after[real], before[real], "outputs with other content in the padding", 1e-10)


def padded_batch(case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    """Two sequences, of 8 and of 5 tokens, padded to 8; for cross attention the sources are padded."""
    key_padding_mask = torch.ones(2, PADDED, dtype=torch.bool)
    key_padding_mask[1, TOKENS:] = False
    return case.rows(2, PADDED), case.source(2, PADDED), key_padding_mask
