from __future__ import annotations

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.rowwise import Targets
from attn_models import losses
from attn_models.decoder.decoder import Decoder
from attn_models.losses import linear_cross_entropy
from attn_schema.decoder import DecoderConfig
from torch import Tensor
from torch.nn import functional

KINDS = [
    Targets(),
    Targets(ignored=3),
    Targets(smoothing=0.1),
    Targets(cap=2.0),
    Targets(ignored=3, smoothing=0.2, cap=5.0),
]
VOCABULARY, WIDTH = 37, 12


def drawn(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, a matrix, and ids of which every fifth is 3."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (
        torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for count in (rows, VOCABULARY)
    )
    ids = torch.randint(VOCABULARY, (rows,), generator=generator)
    ids[::5] = 3
    return hidden.requires_grad_(), weight.requires_grad_(), ids


def defined(hidden: Tensor, weight: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """By torch's own, over all logits."""
    logits = hidden @ weight.T
    if targets.cap is not None:
        logits = targets.cap * torch.tanh(logits / targets.cap)
    return functional.cross_entropy(logits, ids, ignore_index=targets.ignored, label_smoothing=targets.smoothing)


@pytest.fixture
def parts(monkeypatch):
    """Five rows at a time."""
    monkeypatch.setitem(losses.LOGITS, "cpu", 5 * VOCABULARY)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("rows", [6, 23, 25])
@pytest.mark.parametrize("targets", KINDS, ids=str)
def test_part_by_part_losses_and_gradients_are_those_of_all_logits(targets, rows):
    hidden, weight, ids = drawn(rows)
    ids[-1] = 4
    found, expected = (compute(hidden, weight, ids, targets) for compute in (linear_cross_entropy, defined))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.usefixtures("parts")
def test_gradients_are_those_of_finite_differences():
    hidden, weight, ids = drawn(7)
    assert torch.autograd.gradcheck(lambda *leaves: linear_cross_entropy(*leaves, ids, KINDS[-1]), (hidden, weight))


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_of_few_bits_are_summed_in_float32(dtype):
    hidden, weight, ids = drawn(203, dtype)
    exact = [part.detach().double().requires_grad_() for part in (hidden, weight)]
    truth = torch.autograd.grad(defined(*exact, ids, Targets()), exact)
    usual = torch.autograd.grad(defined(hidden, weight, ids, Targets()), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, ids, Targets())
    assert loss.dtype == torch.float32
    for found, plain, exactly in zip(torch.autograd.grad(loss, (hidden, weight)), usual, truth, strict=True):
        errors = [float((some.double() - exactly).norm() / exactly.norm()) for some in (found, plain)]
        assert found.dtype == dtype
        assert errors[0] <= 1.25 * errors[1] + 2 * torch.finfo(dtype).eps


@pytest.mark.usefixtures("parts")
def test_a_mean_over_very_many_rows_is_not_rounded_to_few_bits_before_it_scales():
    hidden, weight, ids = drawn(7, torch.float16)
    large = (1000 * hidden.detach()).requires_grad_()
    # With the mean over seven rows one and a half times the least number that float16 holds.
    scale = 7 * 1.5 * 2.0**-24
    exact = [part.detach().double().requires_grad_() for part in (large, weight)]
    (truth,) = torch.autograd.grad(scale * defined(*exact, ids, Targets()), exact[1])
    (found,) = torch.autograd.grad(scale * linear_cross_entropy(large, weight, ids, Targets()), weight)
    assert (found.double() - truth).norm() < 0.01 * truth.norm()


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("learned", ["hidden", "weight", "none"])
def test_what_does_not_learn_gets_no_gradient(learned):
    hidden, weight, ids = drawn(11)
    hidden.requires_grad_(learned == "hidden")
    weight.requires_grad_(learned == "weight")
    loss = linear_cross_entropy(hidden, weight, ids, Targets())
    torch.testing.assert_close(loss, defined(hidden, weight, ids, Targets()))
    if learned != "none":
        loss.backward()
    assert (hidden.grad is not None, weight.grad is not None) == (learned == "hidden", learned == "weight")


@pytest.mark.usefixtures("parts")
def test_without_gradients_none_are_made(monkeypatch):
    hidden, weight, ids = drawn(11)
    monkeypatch.setattr(losses, "row_losses_and_gradients", None)
    with torch.inference_mode():
        torch.testing.assert_close(
            linear_cross_entropy(hidden, weight, ids, Targets()), defined(hidden, weight, ids, Targets())
        )


@pytest.mark.usefixtures("parts")
def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    hidden, weight, ids = drawn(11)
    loss = linear_cross_entropy(hidden, weight, ids, Targets())
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (hidden, weight))))


@pytest.mark.usefixtures("parts")
def test_where_all_rows_are_ignored_the_loss_and_its_gradients_are_0():
    hidden, weight, _ = drawn(11)
    loss = linear_cross_entropy(hidden, weight, torch.full((11,), -100), Targets())
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.usefixtures("parts")
def test_under_autocast_products_are_in_its_type_and_losses_in_float32():
    hidden, weight, ids = drawn(11, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (compute(hidden, weight, ids, Targets()) for compute in (linear_cross_entropy, defined))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    hidden, weight, ids = drawn(6)
    ids[2] = wrong
    with pytest.raises(InvalidValue, match=f"ids: {wrong} is not allowed"):
        linear_cross_entropy(hidden, weight, ids, Targets())


@pytest.mark.parametrize(
    "more",
    [{}, {"tie_word_embeddings": False}, {"final_logit_softcapping": 3.0}, {"num_nextn_predict_layers": 1}],
    ids=str,
)
def test_a_decoder_learns_the_same_part_by_part(monkeypatch, more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "max_seq_len": 16, "vocab_size": VOCABULARY}
    model = Decoder(DecoderConfig(**sizes, **more))
    text = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for limit in (5 * VOCABULARY, 1 << 24):
        monkeypatch.setitem(losses.LOGITS, "cpu", limit)
        model.zero_grad()
        loss = model.training_loss(text[:, :-1], text[:, 1:])
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[0], found[1])
