"""`attn_variants.attend` against torch's scaled_dot_product_attention, FlexAttention's conventions and the layers."""

import pytest
import torch
from attn_core import Causal, Window
from attn_core.distributions import SoftmaxWithSink
from attn_core.errors import InvalidValue, KernelRefused
from attn_core.masks import Predicate, Prefix
from attn_core.modifiers import Alibi, SoftCap
from attn_core.scores import Cosine, Dot
from attn_variants import attend
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

TOLERANCE = {"rtol": 0, "atol": 1e-12}


def tensors(batch=2, heads=4, kv_heads=4, queries=6, keys=6, size=8, value_size=8):
    return (
        torch.randn(batch, heads, queries, size, dtype=torch.float64, requires_grad=True),
        torch.randn(batch, kv_heads, keys, size, dtype=torch.float64, requires_grad=True),
        torch.randn(batch, kv_heads, keys, value_size, dtype=torch.float64, requires_grad=True),
    )


def compare(ours, theirs, given):
    """Outputs and gradients of both."""
    assert torch.allclose(ours, theirs, **TOLERANCE)
    along = torch.randn_like(theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, given, along), torch.autograd.grad(theirs, given, along), strict=True
    ):
        assert torch.allclose(mine, other, **TOLERANCE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_plain_calls_are_those_of_torch(is_causal, scale):
    given = tensors(value_size=6)
    theirs = scaled_dot_product_attention(*given, is_causal=is_causal, scale=scale)
    compare(attend(*given, is_causal=is_causal, scale=scale), theirs, given)


def test_grouped_heads_are_those_of_torch():
    given = tensors(kv_heads=2)
    compare(attend(*given, enable_gqa=True), scaled_dot_product_attention(*given, enable_gqa=True), given)
    with pytest.raises(InvalidValue, match="enable_gqa=True"):
        attend(*given)


@pytest.mark.parametrize("shape", [(6, 7), (1, 7), (2, 1, 6, 7), (2, 4, 6, 7), (1, 4, 6, 7), (2, 1, 1, 7)])
@pytest.mark.parametrize("kernel", [None, "plain"])
def test_bool_tensors_keep_on_true_as_in_torch(shape, kernel):
    given, mask = tensors(keys=7), torch.rand(shape) < 0.6
    mask[..., 0] = True
    compare(attend(*given, mask, kernel=kernel), scaled_dot_product_attention(*given, attn_mask=mask), given)


@pytest.mark.parametrize("shape", [(6, 7), (2, 4, 6, 7), (2, 1, 1, 7)])
@pytest.mark.parametrize("kernel", [None, "plain"])
def test_float_tensors_are_added_to_the_scores_as_in_torch(shape, kernel):
    given = tensors(keys=7)
    bias = torch.randn(shape, dtype=torch.float64)
    bias[..., 3] = -torch.inf
    bias.requires_grad_()
    ours = attend(*given, bias, kernel=kernel)
    compare(ours, scaled_dot_product_attention(*given, attn_mask=bias), [*given, bias])


def test_a_query_that_may_see_no_key_gives_zeros():
    given, mask = tensors(), torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    for hidden in (mask, torch.zeros(6, 6, dtype=torch.float64).masked_fill(~mask, -torch.inf)):
        out = attend(*given, hidden)
        assert not out[:, :, 2].any()
        assert out.isfinite().all()


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (Causal(), lambda i, j: j <= i),
        (Window(left=2, right=1), lambda i, j: (i - 2 <= j) & (j <= i + 1)),
        (Prefix(2) | Causal(), lambda i, j: (j < 2) | (j <= i)),
        (Predicate(lambda i, j: (i - j) % 2 == 0), lambda i, j: (i - j) % 2 == 0),
    ],
)
def test_masks_are_rules_of_positions(mask, rule):
    given, place = tensors(), torch.arange(6)
    allowed = rule(place[:, None], place)
    compare(attend(*given, mask), scaled_dot_product_attention(*given, attn_mask=allowed), given)
    compare(attend(*given, allowed), scaled_dot_product_attention(*given, attn_mask=allowed), given)


def test_causal_queries_are_aligned_with_the_last_keys():
    given = tensors(queries=2, keys=5)
    allowed = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    compare(attend(*given, is_causal=True), scaled_dot_product_attention(*given, attn_mask=allowed), given)


def test_a_tensor_and_causality_and_padding_hide_together():
    given, mask = tensors(), torch.rand(2, 4, 6, 6) < 0.7
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    mask[..., 0] = True
    together = mask & torch.ones(6, 6).tril().bool() & real[:, None, None]
    ours = attend(*given, mask, is_causal=True, key_padding_mask=real)
    compare(ours, scaled_dot_product_attention(*given, attn_mask=together), given)


def test_scores_modifiers_and_distributions_are_chosen_by_value():
    query, key, value = given = tensors()
    capped = attend(*given, score=Dot(), modifiers=[SoftCap(cap=2.0)])
    assert torch.allclose(capped, (2 * torch.tanh(query @ key.mT / 2)).softmax(-1) @ value, **TOLERANCE)
    logit = torch.randn(4, dtype=torch.float64)
    with_sink = attend(*given, distribution=SoftmaxWithSink(), parameters={"distribution.logit": logit})
    powers = (query @ key.mT / 8**0.5).exp()
    assert torch.allclose(with_sink, powers / (powers.sum(-1, keepdim=True) + logit.exp()[:, None, None]) @ value)
    biased = attend(*given, is_causal=True, modifiers=[Alibi()])
    assert torch.allclose(biased, attend(*given, is_causal=True, modifiers=[Alibi()], kernel="plain"), **TOLERANCE)


def test_a_batch_of_one_may_be_left_out():
    given = tensors(batch=1)
    alone = attend(*(rows[0] for rows in given), is_causal=True)
    assert torch.equal(alone, attend(*given, is_causal=True)[0])


def test_sixteen_bits_give_sixteen_bits():
    given = [rows.detach().to(torch.bfloat16) for rows in tensors()]
    out = attend(*given, torch.ones(6, 6, dtype=torch.bool))
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), attend(*(rows.double() for rows in given)), atol=0.02)


def test_dropout_drops_weights_and_keeps_their_mean():
    torch.manual_seed(0)
    query, key, _ = (rows.detach() for rows in tensors(queries=1, keys=64))
    value = torch.ones(2, 4, 64, 1, dtype=torch.float64)
    sums = torch.stack([attend(query, key, value, dropout_p=0.5) for _ in range(200)])
    assert sums.std() > 0.01
    assert abs(sums.mean() - 1) < 0.02


def test_calls_that_differ_in_the_entries_of_a_tensor_share_their_choice_of_a_kernel():
    from attn_variants.functional import cached_kernels

    given = tensors()
    attend(*given, torch.ones(6, 6, dtype=torch.bool))
    before = cached_kernels.cache_info().currsize
    for _ in range(3):
        attend(*given, torch.rand(6, 6) < 0.5)
    assert cached_kernels.cache_info().currsize == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "mask"),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.int64)}, "bool tensor"),
        ({"attn_mask": "causal"}, "a mask of attn_core"),
        ({"score": Cosine()}, "parameters.*score.sharpness"),
        ({"score": Dot(), "scale": 2.0}, "scale"),
        ({"key_padding_mask": torch.ones(2, 5, dtype=torch.bool)}, "key_padding_mask"),
        ({"key_padding_mask": torch.ones(2, 6)}, "key_padding_mask"),
        ({"value": torch.randn(2, 4, 5, 8).double()}, "value.shape"),
        ({"key": torch.randn(2, 4, 6, 7).double()}, "head_dim 8"),
        ({"key": torch.randn(6, 7).double()}, "key: .6, 7."),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    query, key, value = tensors()
    with pytest.raises(InvalidValue, match=message):
        attend(**({"query": query, "key": key, "value": value} | changes))


def test_a_kernel_asked_for_by_name_computes_or_refuses():
    given = tensors()
    assert torch.allclose(attend(*given, kernel="plain"), attend(*given, kernel="torch_sdpa"), **TOLERANCE)
    with pytest.raises(KernelRefused):
        attend(*given, score=Dot(), modifiers=[SoftCap(cap=2.0)], kernel="torch_sdpa")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": [[1.0]]}, "query: 'list'.*a tensor"),
        ({"key": torch.zeros(2, 4, 6, 8, dtype=torch.float32)}, "key.dtype: 'torch.float32'.*torch.float64"),
        ({name: torch.zeros(2, 4, 6, 8).int() for name in ("query", "key", "value")}, "query.dtype: 'torch.int32'"),
        ({"attn_mask": torch.ones(3, 1, 6, 6, dtype=torch.bool)}, "mask.shape: .3, 1, 6, 6.*broadcasts"),
        ({"attn_mask": torch.ones(3, 6, 6, dtype=torch.bool)}, "mask.shape.*broadcasts"),
        ({"attn_mask": torch.ones(1, 2, 4, 6, 6, dtype=torch.bool)}, "mask.shape.*broadcasts"),
        ({"attn_mask": [[True]]}, "mask: 'list'"),
        ({"score": "dot"}, "score: 'dot'"),
        ({"modifiers": Alibi()}, "modifiers.*a list"),
        ({"modifiers": ["alibi"]}, "modifiers: 'alibi'"),
        ({"distribution": "softmax"}, "distribution: 'softmax'"),
        ({"scale": "large"}, "scale"),
        ({"scale": float("inf")}, "scale"),
        ({"dropout_p": 1.5}, "dropout_p"),
        ({"key_padding_mask": [True]}, "key_padding_mask: 'list'"),
        ({"distribution": SoftmaxWithSink(), "parameters": {"distribution.logit": [0.0]}}, "no tensor"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(changes, message):
    query, key, value = tensors()
    with pytest.raises(InvalidValue, match=message):
        attend(**({"query": query, "key": key, "value": value} | changes))


@pytest.mark.parametrize("sizes", [(5, 7), (1, 7), (7, 5), (0, 3), (3, 0)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("batched", [True, False])
def test_every_length_mask_and_sharing_of_heads_is_as_in_torch(sizes, kv_heads, batched):
    queries, keys = sizes
    given = [rows.detach() for rows in tensors(kv_heads=kv_heads, queries=queries, keys=keys, value_size=6)]
    given = given if batched else [rows[0] for rows in given]
    lead = (2, 4) if batched else (4,)
    for shape in ((queries, keys), (1, keys), (4, 1, keys), (*lead, queries, keys), (*lead[:-1], 1, queries, keys)):
        for mask in (torch.rand(shape) < 0.6, torch.randn(shape, dtype=torch.float64)):
            theirs = scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True)
            ours = attend(*given, mask, enable_gqa=True)
            assert ours.shape == theirs.shape
            # Torch gives NaN or zeros for a query that may see no key.
            assert torch.allclose(ours, theirs.nan_to_num(), **TOLERANCE)


def test_padding_of_one_sequence_needs_no_batch():
    query, key, value = (rows[0] for rows in tensors(batch=1, keys=7))
    real = torch.arange(7) < 5
    ours = attend(query, key, value, key_padding_mask=real)
    compare(ours, scaled_dot_product_attention(query, key, value, attn_mask=real.expand(6, 7)), [query, key, value])


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("sizes", [(4, 6), (6, 6), (6, 4)])
def test_the_causal_biases_of_torch_mean_what_they_mean_there(bias, sizes):
    query, key, value = (torch.randn(2, 4, length, 8) for length in (sizes[0], sizes[1], sizes[1]))
    found = attend(query, key, value, bias(*sizes))
    expected = scaled_dot_product_attention(query, key, value, bias(*sizes))
    sees = bias(*sizes)._materialize("cpu").any(-1)
    torch.testing.assert_close(found[:, :, sees], expected[:, :, sees])
    with pytest.raises(InvalidValue, match="mask"):
        attend(query[:, :, 1:], key, value, bias(*sizes))
