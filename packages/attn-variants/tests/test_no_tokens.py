"""A sequence without tokens is attended to: nothing comes in, nothing comes out, and nothing is raised."""

import torch
from attn_core import Capability, configure, installed
from cases import each

SIZES = {"hidden_size": 8, "num_heads": 2, "max_seq_len": 16}
MODES = [
    (mechanism, causal)
    for mechanism in installed().mechanisms
    for capability, causal in ((Capability.CAUSAL, True), (Capability.BIDIRECTIONAL, False))
    if mechanism.can(capability)
]


@each("mechanism,causal", MODES)
def test_no_tokens_come_out_where_none_come_in(mechanism, causal):
    layer = mechanism.build(configure(mechanism, mechanism.sketch, causal=causal, **SIZES)).eval()
    rows = torch.zeros(2, 0, 8)
    source = (torch.randn(2, 3, 8),) if mechanism.only_cross else ()
    assert layer(rows, *source).shape == (2, 0, 8)
