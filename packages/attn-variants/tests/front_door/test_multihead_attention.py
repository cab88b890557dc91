"""`attn_variants.MultiheadAttention` against `torch.nn.MultiheadAttention`."""

import copy

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_variants import MultiheadAttention
from torch import nn

TOLERANCE = {"rtol": 0, "atol": 1e-12}


def pair(embed_dim=24, num_heads=3, batch_first=True, **options):
    """torch's module and ours with its parameters, in float64."""
    theirs = nn.MultiheadAttention(embed_dim, num_heads, batch_first=batch_first, **options).double()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    ours = MultiheadAttention(embed_dim, num_heads, batch_first=batch_first, dtype=torch.float64, **options)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    return ours, theirs


def same(ours, theirs, *given, **options):
    """Outputs, weights, and gradients of inputs and of the output projection of both modules."""
    results = []
    for module, projection in ((ours, ours.attention.output), (theirs, theirs.out_proj)):
        rows = [tensor.detach().clone().requires_grad_() for tensor in given]
        out, weights = module(*rows, **options)
        along = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
        results.append([out, weights, *torch.autograd.grad(out, [*rows, projection.weight], along)])
    for mine, other in zip(*results, strict=True):
        if other is None:
            assert mine is None
        else:
            assert mine.shape == other.shape
            assert torch.allclose(mine, other, **TOLERANCE)


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


PADDING = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
FLOAT_PADDING = torch.zeros(2, 7, dtype=torch.float64).masked_fill(PADDING, -torch.inf)

ADDED = [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}]
HIDDEN = torch.ones(5, 7).triu(3).bool()


@pytest.mark.parametrize("options", ADDED)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [None, HIDDEN, torch.randn(5, 7).double()])
def test_keys_that_every_query_also_attends_to(options, need_weights, mask):
    ours, theirs = pair(**options)
    padding = None if mask is not None and mask.dtype != torch.bool else PADDING
    given = [rows(2, 5, 24), rows(2, 7, 24), rows(2, 7, 24)]
    same(ours, theirs, *given, need_weights=need_weights, attn_mask=mask, key_padding_mask=padding)


def test_a_query_that_sees_only_the_key_of_zeros_gives_the_bias_of_the_output():
    ours, _ = pair(add_zero_attn=True)
    out, _ = ours(*[rows(1, 4, 24)] * 3, attn_mask=torch.ones(4, 4).bool())
    assert torch.allclose(out, ours.attention.output.bias.expand(1, 4, 24), **TOLERANCE)


def test_the_positional_arguments_are_those_of_torch():
    given = (24, 3, 0.0, False, True, True, 12, 8, True, "cpu", torch.float64)
    ours, theirs = MultiheadAttention(*given), nn.MultiheadAttention(*given)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    same(ours, theirs, rows(2, 5, 24), rows(2, 7, 12), rows(2, 7, 8))


def test_a_mechanism_that_cannot_add_keys_refuses_them():
    for mechanism in ("linear", "sliding_window"):
        with pytest.raises(Incompatible, match="add_bias_kv"):
            MultiheadAttention(24, 3, mechanism=mechanism, add_bias_kv=True)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_queries_keys_and_values_of_their_own(batch_first, bias, need_weights):
    ours, theirs = pair(batch_first=batch_first, bias=bias)
    given = [rows(2, 5, 24), rows(2, 7, 24), rows(2, 7, 24)]
    if not batch_first:
        given = [tensor.transpose(0, 1) for tensor in given]
    same(ours, theirs, *given, need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", [None, (5, 7), (2 * 3, 5, 7)])
def test_masks(need_weights, average, additive, padded, shape):
    ours, theirs = pair()
    padding, mask = (FLOAT_PADDING + 0.5 if additive else PADDING) if padded else None, None
    if shape is not None:
        mask = torch.rand(shape) < 0.4
        mask[..., 0] = False
        mask = rows(*shape).masked_fill(mask, -torch.inf) if additive else mask
    options = {"need_weights": need_weights, "average_attn_weights": average}
    given = rows(2, 5, 24), rows(2, 7, 24), rows(2, 7, 24)
    same(ours, theirs, *given, key_padding_mask=padding, attn_mask=mask, **options)


def test_masks_of_two_types_hide_together():
    ours, _ = pair()
    given, hides = (rows(2, 5, 24), rows(2, 7, 24), rows(2, 7, 24)), torch.rand(5, 7) < 0.3
    hides[:, 0] = False
    added = torch.zeros(5, 7, dtype=torch.float64).masked_fill(hides, -torch.inf)
    expected = ours(*given, key_padding_mask=PADDING, attn_mask=hides)
    for padding, mask in ((FLOAT_PADDING, hides), (PADDING, added), (FLOAT_PADDING, added)):
        for mine, other in zip(ours(*given, key_padding_mask=padding, attn_mask=mask), expected, strict=True):
            assert torch.allclose(mine, other, **TOLERANCE)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("hint", [True, False])
def test_causal_masks(need_weights, hint):
    ours, theirs = pair()
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    given = [rows(2, 6, 24)] * 3
    same(ours, theirs, *given, attn_mask=mask, is_causal=hint, need_weights=need_weights)
    expected, _ = theirs(*given, attn_mask=mask)
    assert torch.allclose(ours(*given, is_causal=True, need_weights=False)[0], expected, **TOLERANCE)


@pytest.mark.parametrize("need_weights", [True, False])
def test_one_sequence_without_a_batch(need_weights):
    ours, theirs = pair()
    given, options = (rows(5, 24), rows(7, 24), rows(7, 24)), {"need_weights": need_weights}
    same(ours, theirs, *given, **options)
    same(ours, theirs, *given, key_padding_mask=PADDING[1], attn_mask=torch.ones(3, 5, 7).triu(2).bool(), **options)


def test_keys_and_values_of_other_sizes():
    ours, theirs = pair(kdim=10, vdim=14)
    same(ours, theirs, rows(2, 5, 24), rows(2, 7, 10), rows(2, 7, 14))
    with pytest.raises(InvalidValue, match=r"key\.shape"):
        ours(rows(2, 5, 24), rows(2, 7, 24), rows(2, 7, 14))


def test_a_query_whose_keys_are_all_padding_gives_the_bias_alone():
    ours, _ = pair()
    out, weights = ours(*[rows(2, 7, 24)] * 3, key_padding_mask=torch.ones(2, 7, dtype=torch.bool))
    assert not weights.any()
    assert torch.equal(out, ours.attention.output.bias.expand_as(out))


def test_a_layer_of_torch_computes_the_same_with_it():
    encoder = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True).double()
    other, given = copy.deepcopy(encoder), rows(2, 7, 24)
    other.self_attn = MultiheadAttention(24, 3, dtype=torch.float64)
    other.load_state_dict(encoder.state_dict())
    for training in (True, False):
        encoder.train(training)
        other.train(training)
        mine, theirs = (module(given, src_key_padding_mask=PADDING) for module in (other, encoder))
        assert torch.allclose(mine[~PADDING], theirs[~PADDING], **TOLERANCE)


def test_its_own_state_dict_comes_back():
    ours, _ = pair()
    other = MultiheadAttention(24, 3, dtype=torch.float64)
    other.load_state_dict(ours.state_dict())
    given = [rows(2, 5, 24)] * 3
    assert torch.equal(other(*given)[0], ours(*given)[0])


def test_a_state_dict_of_another_shape_is_refused():
    with pytest.raises(RuntimeError, match="in_proj_weight has 72 rows"):
        MultiheadAttention(24, 3, mechanism="mqa").load_state_dict(nn.MultiheadAttention(24, 3).state_dict())


def test_dropout_drops_weights_in_training_only():
    module, given = MultiheadAttention(24, 3, dropout=0.5), [torch.randn(2, 5, 24)] * 3
    out, weights = module(*given, average_attn_weights=False)
    assert 0.2 < (weights == 0).float().mean() < 0.8
    assert not torch.equal(out, module(*given)[0])
    assert torch.equal(module.eval()(*given)[0], module(*given)[0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gqa", {"num_kv_heads": 2}),
        ("mqa", {}),
        ("sliding_window", {"window": 3}),
        ("alibi", {}),
        ("sparsemax", {}),
        ("rope", {}),
        ("sink", {}),
        ("qk_norm", {}),
        ("cosine", {}),
    ],
)
def test_mechanisms_with_a_spec_take_everything(name, options):
    module = MultiheadAttention(24, 4, mechanism=name, dtype=torch.float64, **options)
    given, hides = (rows(2, 5, 24), rows(2, 7, 24), rows(2, 7, 24)), torch.rand(8, 5, 7) < 0.3
    for weighed in ({"need_weights": True}, {"need_weights": False}):
        out, weights = module(*given, key_padding_mask=PADDING, attn_mask=hides, **weighed)
        assert out.shape == (2, 5, 24)
        assert weights is None or weights.shape == (2, 5, 7)
    kept = module(*given, key_padding_mask=PADDING, attn_mask=hides, average_attn_weights=False)
    assert torch.allclose(kept[0], out, **TOLERANCE)
    assert not kept[1].masked_select(hides.view(2, 4, 5, 7) | PADDING[:, None, None]).any()


@pytest.mark.parametrize("name", ["gqa", "rope", "alibi", "qk_norm"])
def test_self_attention_is_that_of_the_mechanisms_layer(name):
    module, given = MultiheadAttention(24, 4, mechanism=name, dtype=torch.float64), rows(2, 7, 24)
    out, weights = module(given, given, given, key_padding_mask=PADDING, average_attn_weights=False)
    assert torch.allclose(out, module.attention(given, key_padding_mask=~PADDING), **TOLERANCE)
    assert torch.allclose(weights, module.attention.weights(given, key_padding_mask=~PADDING), **TOLERANCE)


def test_cross_attention_takes_the_source_as_keys_and_values():
    module = MultiheadAttention(24, 4, mechanism="local_m", radius=1)
    query, source = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    out, weights = module(query, source, source, key_padding_mask=PADDING)
    assert torch.equal(out, module(query, source, source, key_padding_mask=PADDING, need_weights=True)[0])
    assert weights[0, 4].nonzero().flatten().tolist() == [3, 4, 5]


@pytest.mark.parametrize("name", ["linear", "performer", "mla"])
def test_other_mechanisms_compute_self_attention(name):
    module, given = MultiheadAttention(24, 4, mechanism=name), torch.randn(2, 7, 24)
    out, _ = module(given, given, given, key_padding_mask=PADDING, need_weights=False)
    assert torch.equal(out, module.attention(given, key_padding_mask=~PADDING))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_dropout_of_one_drops_every_weight_in_training(training, need_weights):
    ours, theirs = (module.train(training) for module in pair(dropout=1.0))
    same(ours, theirs, rows(2, 5, 24), rows(2, 7, 24), rows(2, 7, 24), need_weights=need_weights)


def test_what_a_mechanism_cannot_do_is_refused():
    module, given = MultiheadAttention(24, 4, mechanism="linear"), torch.randn(2, 7, 24)
    with pytest.raises(Incompatible, match="must be one tensor"):
        module(given, given.clone(), given)
    with pytest.raises(Incompatible, match="attn_mask must be None"):
        module(given, given, given, attn_mask=torch.zeros(7, 7))
    with pytest.raises(Incompatible, match="build it with causal=True"):
        module(given, given, given, is_causal=True)
    module = MultiheadAttention(24, 4, mechanism="performer", causal=True)
    assert module(given, given, given, is_causal=True, need_weights=False)[1] is None
    with pytest.raises(Incompatible, match="equal to embed_dim"):
        MultiheadAttention(24, 4, mechanism="linear", kdim=12)
    with pytest.raises(Incompatible, match="dropout must be 0"):
        MultiheadAttention(24, 4, dropout=0.1, mechanism="linear")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"key_padding_mask": torch.zeros(2, 6, dtype=torch.bool)}, "key_padding_mask.shape"),
        ({"key_padding_mask": torch.zeros(2, 7, dtype=torch.int64)}, "key_padding_mask.dtype"),
        ({"attn_mask": torch.zeros(7, 5)}, "attn_mask.shape"),
        ({"attn_mask": torch.zeros(5, 7, dtype=torch.int64)}, "attn_mask.dtype"),
        ({"value": torch.randn(2, 6, 24)}, "value.shape"),
        ({"value": torch.randn(7, 24)}, "value"),
        ({"query": [[1.0]]}, "query: 'list'"),
        ({"key": torch.randn(2, 7, 24).double()}, "key.dtype: 'torch.float64'"),
        ({name: torch.zeros(2, 7, 24).double() for name in ("query", "key", "value")}, "dtype of the parameters"),
        ({name: torch.zeros(2, 7, 24).long() for name in ("query", "key", "value")}, "floating-point"),
        ({"attn_mask": [[True]]}, "attn_mask: 'list'"),
        ({"key_padding_mask": [True]}, "key_padding_mask: 'list'"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(given, message):
    module = MultiheadAttention(24, 4)
    with pytest.raises(InvalidValue, match=message):
        module(
            **({"query": torch.randn(2, 5, 24), "key": torch.randn(2, 7, 24), "value": torch.randn(2, 7, 24)} | given)
        )


def test_repr_says_mechanism_heads_and_causality():
    shown = repr(MultiheadAttention(24, 4, mechanism="gqa", num_kv_heads=2))
    assert "mechanism='gqa', hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=6, causal=False" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kdim": 0}, "kdim: 0"),
        ({"vdim": -1}, "vdim: -1"),
        ({"hidden_size": 24}, "embed_dim gives"),
        ({"dropout": 2.0}, "dropout: 2.0"),
    ],
)
def test_options_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(InvalidValue, match=message):
        MultiheadAttention(24, 4, **options)


@pytest.mark.parametrize("need_weights", [True, False])
def test_no_keys_give_the_bias_alone_and_weights_of_nothing(need_weights):
    ours, _ = pair()
    out, weights = ours(rows(2, 5, 24), rows(2, 0, 24), rows(2, 0, 24), need_weights=need_weights)
    assert torch.equal(out, ours.attention.output.bias.expand_as(out))
    assert weights is None if not need_weights else weights.shape == (2, 5, 0)


def test_autocast_mixes_types_as_in_torch():
    ours, theirs = (module.float() for module in pair())
    given = [torch.randn(2, 5, 24), *[torch.randn(2, 7, 24).bfloat16()] * 2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, other = (module(*given, need_weights=False)[0] for module in (ours, theirs))
    assert torch.allclose(mine.float(), other.float(), atol=0.05)
