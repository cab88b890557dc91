"""Which mechanisms depend on padding in front of a sequence: what they declare is what they do."""

import pytest
import torch
from attn_core import Capability, Rotary, configure, installed
from attn_core.errors import UserError
from attn_testing.laws.ordinary_use import alone_and_behind_padding
from attn_testing.subject import Case
from attn_variants import MultiheadAttention
from cases import each

MODES = ({"causal": True}, {"causal": False}, {"cross": True}, {"causal": True, "rotary": Rotary()})
PADDED = [mechanism for mechanism in installed().mechanisms if mechanism.can(Capability.PADDING)]


@each("mechanism", PADDED)
def test_a_mechanism_depends_on_padding_where_it_says_so(mechanism):
    tried = 0
    for mode in MODES:
        try:
            config = configure(mechanism, mechanism.sketch, hidden_size=16, num_heads=4, max_seq_len=64, **mode)
            with torch.no_grad():
                alone, behind = alone_and_behind_padding(Case(mechanism, config, mode, ""))
        except UserError:
            continue
        tried += 1
        assert mechanism.depends_on_padding(config) == (not torch.allclose(alone, behind, rtol=0, atol=1e-9))
    assert tried


@pytest.mark.parametrize("name", ["local_m", "local_p"])
@pytest.mark.parametrize("additive", [False, True])
def test_local_attention_counts_a_source_from_its_first_real_token(name, additive):
    module = MultiheadAttention(16, 4, mechanism=name, cross=True, radius=2, dtype=torch.float64)
    query, source, noise = (torch.randn(1, length, 16, dtype=torch.float64) for length in (4, 9, 3))
    hidden = (torch.arange(12) < 3)[None]
    given = torch.zeros(1, 12, dtype=torch.float64).masked_fill(hidden, -torch.inf) if additive else hidden
    padded = torch.cat([noise, source], dim=1)
    for need_weights in (True, False):
        out, _ = module(query, padded, padded, key_padding_mask=given, need_weights=need_weights)
        torch.testing.assert_close(out, module(query, source, source)[0], rtol=0, atol=1e-12)
