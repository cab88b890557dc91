"""Claims about what self-attention computes, of layers as users build them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Heads, configure, installed
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from attn_variants.compute import plain
from attn_variants.distributions import softmax
from torch import Tensor

WIDTH = 16
WITHOUT_POSITIONS = ["mha", "mqa", "sigmoid", "sparsemax", "efficient", "cosine"]
ROWS_OF_WEIGHTS = ["mha", "mqa", "rope", "alibi", "entmax", "sliding_window", "differential", "retnet"]


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def layer(name: str, **shared: Any) -> Any:
    torch.manual_seed(0)
    mechanism = installed().mechanisms.get(name)
    return mechanism.build(configure(mechanism, hidden_size=WIDTH, num_heads=4, **shared)).double().eval()


@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_cl_23_self_attention_gives_the_same_rows_in_another_order(name: str) -> None:
    built, rows = layer(name, causal=False), doubles(2, 9, WIDTH)
    order = torch.randperm(9)
    assert torch.allclose(built(rows[:, order]), built(rows)[:, order], rtol=0, atol=1e-14)


def test_cl_23_positions_end_that() -> None:
    built, rows = layer("alibi", causal=False), doubles(2, 9, WIDTH)
    assert (built(rows.flip(1)).flip(1) - built(rows)).abs().max() < 1e-14  # distances are the same from both ends
    order = torch.tensor([4, 0, 8, 1, 7, 2, 6, 3, 5])
    assert (built(rows[:, order]) - built(rows)[:, order]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ROWS_OF_WEIGHTS)
def test_cl_42_the_weights_of_a_step_are_among_those_of_the_next(name: str) -> None:
    built, rows = layer(name), doubles(1, 8, WIDTH)
    weights = [built.weights(rows[:, :length]) for length in range(1, 9)]
    for before, after in itertools.pairwise(weights):
        length = before.shape[-1]
        assert torch.allclose(after[..., :length, :length], before, rtol=0, atol=1e-14)
        assert not after[..., :length, length:].any()


def test_cl_34_one_pass_under_the_mask_predicts_after_every_beginning_of_the_cat_sat_on_the_mat() -> None:
    words = ["The", "cat", "sat", "on", "the", "mat"]
    vocabulary = {word: number for number, word in enumerate(words)}
    torch.manual_seed(0)
    model = (
        Decoder(DecoderConfig(vocab_size=6, max_seq_len=8, hidden_size=WIDTH, num_layers=2, num_heads=4))
        .double()
        .eval()
    )
    sentence = torch.tensor([[vocabulary[word] for word in words]])
    together = model(sentence)[0]
    alone = [model(sentence[:, :length])[0, -1] for length in range(1, 7)]
    assert together.shape == (6, 6)
    assert torch.allclose(together, torch.stack(alone), rtol=0, atol=1e-13)


def test_cl_51_attention_only_averages_values_and_is_linear_in_them() -> None:
    spec = AttentionSpec(heads=Heads(query=1, key_value=1, key_size=5, value_size=3))
    query, key, value, other = doubles(1, 7, 1, 5), doubles(1, 9, 1, 5), doubles(1, 9, 1, 3), doubles(1, 9, 1, 3)

    def attend(values: Tensor) -> Tensor:
        return plain.attend(spec, AttentionInputs(query=query, key=key, value=values))

    out = attend(value)
    # Inside of the convex hull: in no direction further out than the outermost value.
    directions = doubles(200, 3)
    reached, furthest = (out @ directions.T).amax(1), (value @ directions.T).amax(1)
    assert (reached <= furthest + 1e-12).all()
    assert torch.allclose(attend(2 * value - 3 * other), 2 * out - 3 * attend(other), rtol=0, atol=1e-13)
    same = torch.ones_like(value)
    assert torch.allclose(attend(same), torch.ones_like(out), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("divisor", "largest"), [(1.0, 1.0), (8.0, 0.99982)])
def test_cl_46_scores_as_far_apart_as_98_and_27_leave_one_word_all_the_weight(divisor: float, largest: float) -> None:
    """The weights that the course prints beside these scores illustrate; one of their rows sums to 1.1."""
    weights = softmax(torch.tensor([98.0, 27.0, 10.0, 12.0], dtype=torch.float64) / divisor, None)
    assert weights[0].item() == pytest.approx(largest, abs=5e-6)
    assert weights[1:].max() < 2e-4


def depth(out: Tensor) -> int:
    """Operations on the longest path from an input to `out` that must come one after the other."""
    levels: dict[Any, int] = {None: 0}
    waiting = [out.grad_fn]
    while waiting:
        node = waiting[-1]
        before = [found for found, _ in node.next_functions]
        missing = [found for found in before if found not in levels]
        if missing:
            waiting.extend(missing)
        else:
            levels[waiting.pop()] = 1 + max((levels[found] for found in before), default=0)
    return levels[out.grad_fn]


@pytest.mark.parametrize("name", ["mha", "rope", "additive", "linformer"])
def test_cl_48_the_operations_of_attention_that_must_wait_for_another_are_as_many_at_any_length(name: str) -> None:
    built = layer(name, causal=name != "linformer")
    assert depth(built(doubles(1, 8, WIDTH))) == depth(built(doubles(1, 64, WIDTH))) < 60


@pytest.mark.parametrize("name", ["lstmn", "ntm"])
def test_cl_48_a_recurrent_layer_waits_for_every_token(name: str) -> None:
    built = layer(name)
    depths = [depth(built(doubles(1, length, WIDTH))) for length in (4, 8, 16)]
    assert depths[2] - depths[1] == 2 * (depths[1] - depths[0]) > 0
