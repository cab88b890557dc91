"""One token at a time gives what the whole sequence gives."""

from __future__ import annotations

import torch

from attn_testing.case import Case
from attn_testing.expect import require_same
from attn_testing.law import MechanismLaw
from attn_testing.serving import Serving

TOKENS = 12


def silent_where_nothing_decodes(case: Case) -> str | None:
    """Why a layer cannot run step by step at all: it sees later inputs."""
    return None if case.cross or case.causal else "it is not causal, so it cannot decode"


class DecodeEqualsForward(MechanismLaw):
    """Decoding through `step`, or replay where there is none, gives the rows of the full forward."""

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case)

    def test_every_token_decoded_alone_equals_its_row_of_the_full_forward(self, case: Case) -> None:
        run(case, prompt=1)

    def test_a_prompt_and_then_single_tokens_equal_the_full_forward(self, case: Case) -> None:
        run(case, prompt=5)


def run(case: Case, prompt: int) -> None:
    """Feed `prompt` tokens, then one at a time, and compare with the full forward."""
    rows, source = case.rows(TOKENS), case.source(5)
    with torch.no_grad():
        full = case.attend(rows[None], None if source is None else source[None])[0]
    serving = Serving(case)
    serving.open(0, source)
    first = serving.step({0: rows[:prompt]})[0]
    require_same(first, full[:prompt], f"a first step of {prompt} tokens and the full forward", case.tolerance)
    for position in range(prompt, TOKENS):
        out = serving.step({0: rows[position : position + 1]})[0]
        what = f"token {position} decoded alone and row {position} of the full forward"
        require_same(out[0], full[position], what, case.tolerance)
