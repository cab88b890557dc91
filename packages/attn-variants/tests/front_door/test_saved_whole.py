"""Layers of every mechanism, saved whole: pickled, as processes that share work do it, and by `torch.save`."""

import io
import pickle

import torch
from attn_core import configure, installed
from attn_core.errors import UserError
from attn_variants import MultiheadAttention
from cases import each

MODES = ({"causal": True}, {"causal": False}, {"cross": True})


def layers_of(mechanism):
    """A layer for each mode that the mechanism has."""
    for mode in MODES:
        try:
            config = configure(mechanism, mechanism.sketch, hidden_size=16, num_heads=4, max_seq_len=64, **mode)
        except UserError:
            continue
        yield mechanism.build(config).double()


def through_torch(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@each("mechanism", installed().mechanisms)
def test_a_layer_saved_whole_computes_the_same(mechanism):
    rows = torch.randn(2, 11, 16, dtype=torch.float64)
    tried = 0
    for layer in layers_of(mechanism):
        given = (rows, rows.flip(1)) if layer.mechanism_config.cross else (rows,)
        layer.train()(*given)  # kernels are chosen, and losses of the pass are kept
        for save in (lambda module: pickle.loads(pickle.dumps(module)), through_torch):
            other = save(layer)
            with torch.no_grad():
                assert torch.equal(other.eval()(*given), layer.eval()(*given))
            assert installed().mechanisms.name_of(other.mechanism) == installed().mechanisms.name_of(mechanism)
            assert repr(other) == repr(layer)
        tried += 1
    assert tried


def test_what_is_saved_holds_neither_kernels_nor_other_mechanisms():
    module = MultiheadAttention(16, 4)
    assert len(pickle.dumps(module)) < 4 * (4 * 16 * 17) + 12_000
    other = pickle.loads(pickle.dumps(module))
    assert other.attention.kernels._operation.registry is installed().kernels
