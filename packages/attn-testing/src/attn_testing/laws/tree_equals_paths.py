"""Tokens of a tree, checked side by side, are what each path of it gives alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_testing.case import Case
from attn_testing.expect import require_same
from attn_testing.law import MechanismLaw
from attn_testing.laws.decode_equals_forward import silent_where_nothing_decodes
from attn_testing.memory import DictionaryStore
from attn_testing.serving import LAYER, Serving

KNOWN = 7
"""Tokens before the tree, which are computed as one prompt and one token."""
PARENTS = (-1, -1, 0, 0, 1, 2, 3)
"""Three generations, of which siblings and cousins stand at one position each."""
PATHS = ((0, 2, 5), (1, 4), (0, 3, 6))
"""From each root to each leaf."""


class TreeEqualsPaths(MechanismLaw):
    """Tokens of a tree give what each path gives alone, and so does what follows a path that is kept.

    Miao et al. 2023, arXiv 2305.09781.
    """

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case) or DictionaryStore({LAYER: case.specs}).tree_unsupported_reason()

    def test_tokens_of_a_tree_equal_each_path_alone(self, case: Case) -> None:
        rows = case.rows(KNOWN + len(PARENTS))
        serving = begun(case, rows)
        outputs = serving.tree(0, rows[KNOWN:], PARENTS)
        for path in PATHS:
            what = f"the tokens {path} of the tree {PARENTS} and that path alone"
            require_same(outputs[list(path)], alone(case, rows, path), what, case.tolerance)

    def test_what_follows_a_kept_path_follows_it_alone(self, case: Case) -> None:
        rows, path = case.rows(KNOWN + len(PARENTS) + 1), PATHS[-1]
        serving = begun(case, rows)
        serving.tree(0, rows[KNOWN:-1], PARENTS)
        serving.keep(0, path)
        after = serving.step({0: rows[-1:]})[0][0]
        expected = alone(case, rows, (*path, len(PARENTS)))[-1]
        require_same(after, expected, f"a token behind the path {path} of a tree and behind it alone", case.tolerance)


def begun(case: Case, rows: Tensor) -> Serving:
    """A request whose known rows are computed."""
    serving = Serving(case)
    serving.open(0, case.source(5))
    serving.step({0: rows[: KNOWN - 1]})
    serving.step({0: rows[KNOWN - 1 : KNOWN]})
    return serving


def alone(case: Case, rows: Tensor, path: Sequence[int]) -> Tensor:
    """Outputs [tokens, width] of the rows of a path, token by token."""
    serving = begun(case, rows)
    return torch.cat([serving.step({0: rows[KNOWN + node, None]})[0] for node in path])
