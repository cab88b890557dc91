"""An engine of every causal mechanism says with these kernels what its definition says, in prompts and steps."""

from __future__ import annotations

import pytest
from attn_core import Capability, installed
from attn_engine.graphs import DECODE
from engines import NEW, generated, model_of, require_defined

QUICK = {"alibi", "kda", "positions_added"}
"""Of each kind of layer and kernel one that `test_engine_step` has not; the others take two minutes together."""

MECHANISMS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.oracle)
    for name in installed().mechanisms.names()
    if installed().mechanisms.get(name).can(Capability.CAUSAL)
]


@pytest.mark.parametrize("name", MECHANISMS)
def test_an_engine_says_what_the_definition_says(name, few_processors):
    model = model_of(name)
    found, graphs = generated(model, "shared")
    require_defined(model, found)
    # A prompt's last token is a step of its own where a state is kept at the end of a block.
    assert graphs.replayed[DECODE] >= NEW - 1 if not graphs.reasons else graphs.replayed[DECODE] == 0
