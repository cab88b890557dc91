"""Attribution adds up, agrees with closed forms and with captum, and reads the attention that a model computes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_experiments.attribution.command import show
from attn_experiments.attribution.comparison import (
    adversarial_weights,
    jensen_shannon,
    kendall_tau,
    permuted_change,
    total_variation,
)
from attn_experiments.attribution.methods import (
    Attribution,
    attention_maps,
    converged_gradients,
    embedding_of,
    exact_shapley,
    integrated_gradients,
    mean_embedding,
    next_token_score,
    rollout,
    sampled_shapley,
    shapley_values,
)
from attn_experiments.attribution.text_map import as_html, colour, coloured
from attn_models.loading.encoders import load_classifier, save_classifier
from attn_models.tokenizers.learned import word_tokenizer

SIZES = {"vocab_size": 30, "max_seq_len": 12, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
TOKENS = torch.tensor([3, 1, 4, 1, 5])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    family = installed().models.get("decoder")
    built = family.build(family.configure(SIZES)).eval()
    with torch.no_grad():
        for weight in built.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return built


def test_integrated_gradients_of_cubes_are_cubes():
    rows = torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64)
    found = integrated_gradients(lambda x: (x**3).sum((1, 2)), rows, torch.zeros_like(rows))
    torch.testing.assert_close(found.shares, torch.tensor([1.0, 8.0, -1.0], dtype=torch.float64), rtol=0, atol=1e-6)
    assert found.missing < 1e-6


def test_integrated_gradients_of_a_decoder_add_up_to_the_change_of_its_output(model):
    score, rows = next_token_score(model, TOKENS, 9), model.embedding(TOKENS).detach()
    found = integrated_gradients(score, rows, torch.zeros_like(rows), steps=128)
    with torch.no_grad():
        change = score(rows[None]) - score(torch.zeros_like(rows)[None])
    assert found.shares.sum().item() == pytest.approx(change.item(), abs=2e-3)
    assert abs(change.item()) > 0.05
    assert found.missing < 2e-3


def test_gradients_that_do_not_add_up_are_computed_with_more_steps_or_refused(model):
    score, rows, nothing = (
        next_token_score(model, TOKENS, 9),
        model.embedding(TOKENS).detach(),
        mean_embedding(model, TOKENS),
    )
    found = converged_gradients(score, rows, nothing)
    with torch.no_grad():
        change = (score(rows[None]) - score(nothing[None])).item()
    assert found.shares.sum().item() == pytest.approx(change, rel=0.05)

    def stepped(x: torch.Tensor) -> torch.Tensor:
        return (x.sum((1, 2)) > 1).double() + 1e-9 * x.sum((1, 2))

    with pytest.raises(Incompatible):
        converged_gradients(stepped, torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))


def test_the_score_is_the_models_own_log_probability(model):
    with torch.no_grad():
        expected = model(TOKENS[None])[0, -1].log_softmax(-1)[9]
        found = next_token_score(model, TOKENS, 9)(model.embedding(TOKENS)[None])
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)


def test_shapley_values_of_a_product_and_a_sum_are_those_by_hand():
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def worth(present):
        x = present.double() * values
        return x[:, 0] * x[:, 1] + x[:, 2]

    assert exact_shapley(worth, 3).tolist() == pytest.approx([1.0, 1.0, 3.0])


def test_shapley_values_are_captums_over_all_orders(model):
    from captum.attr import ShapleyValues

    score, rows = next_token_score(model, TOKENS, 9), model.embedding(TOKENS).detach()
    nothing = torch.zeros_like(rows)
    found = shapley_values(score, rows, nothing)

    def of_masks(mask):
        with torch.no_grad():
            return score(mask[..., None] * rows)

    expected = ShapleyValues(of_masks).attribute(torch.ones(1, 5), baselines=torch.zeros(1, 5))[0]
    torch.testing.assert_close(found.shares, expected, rtol=0, atol=1e-5)
    assert found.missing < 1e-5


def test_sampled_orders_come_near_the_exact_values_and_repeat_by_their_seed():
    weights = torch.tensor([1.0, -2.0, 0.0, 4.0, 0.5, 0.5])

    def worth(present):
        return present.float() @ weights + (present[:, 0] & present[:, 1]).float()

    exact = exact_shapley(worth, 6).float()
    found = sampled_shapley(worth, 6, 1200, seed=0)
    torch.testing.assert_close(found, exact, rtol=0, atol=0.15)
    assert found.sum().item() == pytest.approx(exact.sum().item(), abs=1e-5)
    assert torch.equal(found, sampled_shapley(worth, 6, 1200, seed=0))


def test_maps_are_those_that_the_model_gives_of_itself(model):
    own = model.attention_maps(TOKENS, [0, 1])
    for layer, found in enumerate(attention_maps(model, TOKENS)):
        torch.testing.assert_close(found, own[layer], rtol=0, atol=1e-6)


def test_a_model_without_weights_or_embedding_is_refused():
    family = installed().models.get("decoder")
    model = family.build(family.configure(SIZES | {"mechanism": "mla", "options": {"latent": 8, "rotary_size": 4}}))
    linear = torch.nn.Sequential()
    linear.add_module("attention", torch.nn.Linear(5, 5))
    assert len(attention_maps(model, TOKENS)) == 2
    with pytest.raises(Incompatible, match="no attention weights"):
        attention_maps(linear, TOKENS.float())
    with pytest.raises(Incompatible, match="no token embedding"):
        embedding_of(torch.nn.Linear(2, 2))


def test_rollout_multiplies_half_attention_and_half_the_token_itself():
    one = torch.tensor([[[1.0, 0.0], [0.4, 0.6]]])
    two = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.7, 0.3]]])
    flow = rollout([one, two])
    # Rows [1, 0] and [.2, .8], then [1, 0] and [.3, .7]: the second token keeps .7 · .8 of itself.
    torch.testing.assert_close(flow, torch.tensor([[1.0, 0.0], [0.44, 0.56]]), rtol=0, atol=1e-6)
    with pytest.raises(InvalidValue, match="maps"):
        rollout([torch.ones(1, 2, 3)])
    with pytest.raises(InvalidValue, match="maps"):
        rollout([])


def test_kendalls_tau_counts_pairs_in_the_same_order():
    one = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert kendall_tau(one, one**3) == pytest.approx(1)
    assert kendall_tau(one, -one) == pytest.approx(-1)
    assert kendall_tau(one, torch.tensor([1.0, 2.0, 4.0, 3.0])) == pytest.approx(4 / 6)
    # With a tie among six pairs: 5 concordant of √(6 · 5) (τ-b).
    assert kendall_tau(one, torch.tensor([1.0, 2.0, 3.0, 3.0])) == pytest.approx(5 / math.sqrt(30))
    assert kendall_tau(one, torch.ones(4)) == 0
    with pytest.raises(InvalidValue, match="rankings"):
        kendall_tau(one, one[:2])


def test_distances_of_distributions_are_zero_alike_and_largest_apart():
    one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert total_variation(one, one).item() == 0
    assert total_variation(one, other).item() == 1
    assert jensen_shannon(one, one).item() == 0
    assert jensen_shannon(one, other).item() == pytest.approx(math.log(2))


def reads(values):
    """A model of two classes whose logit is a weighted mean of the values of its tokens."""
    return lambda weights: torch.stack([weights @ values, -(weights @ values)], -1).softmax(-1)


def test_an_adversary_is_found_where_tokens_say_the_same_and_not_where_one_alone_decides():
    weights = torch.tensor([[0.7, 0.1, 0.1, 0.1]])
    alike = adversarial_weights(weights, reads(torch.ones(4)))
    assert alike.divergence.item() > 0.3
    assert alike.change.item() <= 0.01
    alone = adversarial_weights(weights, reads(torch.tensor([5.0, -5.0, -5.0, -5.0])))
    assert alone.divergence.item() < alike.divergence.item() / 5
    assert alone.change.item() <= 0.01


def test_permuting_moves_an_output_that_depends_on_the_weights_and_no_other():
    weights, generator = torch.tensor([[0.9, 0.05, 0.05]]), torch.Generator().manual_seed(0)
    moved = permuted_change(weights, reads(torch.tensor([3.0, -3.0, -3.0])), 40, generator)
    same = permuted_change(weights, reads(torch.ones(3)), 40, generator)
    assert moved.item() > 0.5
    assert same.item() == pytest.approx(0, abs=1e-6)


def test_coloured_text_is_the_text_and_red_is_for_and_blue_against():
    found = coloured(["a ", "b\n"], [2.0, -1.0])
    assert found.plain == "a b⏎"
    assert [str(span.style) for span in found.spans] == ["black on rgb(255,0,0)", "black on rgb(128,128,255)"]
    assert colour(0.0) == (255, 255, 255)
    with pytest.raises(InvalidValue, match="finite"):
        coloured(["a"], [float("nan")])


def test_a_page_escapes_what_a_model_says():
    page = as_html(["<b>", "&"], {"attention": [0.5, 0.5]}, "<script>", "why")
    assert "<script>" not in page
    assert "&lt;b&gt;" in page
    assert 'title="0.5"' in page


def test_a_classifiers_label_is_explained_by_its_weights_and_by_parts_that_add_up(attn, tmp_path):
    torch.manual_seed(0)
    family, tokenizer = installed().models.get("text_classifier"), word_tokenizer(["did you see it she saw it"])
    sizes = SIZES | {"vocab_size": tokenizer.vocab_size, "intermediate_size": 16, "classes": 2}
    built = family.build(family.configure(sizes)).eval()
    with torch.no_grad():
        built.classifier.weight.mul_(50)
    folder = save_classifier(tmp_path / "m", built, ["question", "statement"], tokenizer)
    page = tmp_path / "why.html"
    found = json.loads(attn("attribute", str(folder), "did you see it", "--html", str(page), "--json"))
    assert [token.strip() for token in found["tokens"]] == ["did", "you", "see", "it"]
    tokens = torch.tensor([tokenizer.encode("did you see it")])
    with torch.no_grad():
        chances = load_classifier(folder)[0](tokens)[0, 0].log_softmax(-1)
        assert found["shares"]["attention"] == pytest.approx(built.weights(tokens)[0].tolist(), abs=1e-6)
    assert sum(found["shares"]["attention"]) == pytest.approx(1, abs=1e-6)
    assert sum(found["shares"]["rollout"]) == pytest.approx(1, abs=1e-5)
    for name in ("integrated_gradients", "shapley"):
        assert abs(found["sums"][name]["error"]) < 0.05 * max(0.1, abs(found["sums"][name]["sum"]))
    assert ["question", "statement"][int(chances.argmax())] in page.read_text()
    other = json.loads(attn("attribute", str(folder), "did you see it", "--target", "question", "--json"))
    same = json.loads(attn("attribute", str(folder), "did you see it", "--target", "statement", "--json"))
    signs = [one["shares"]["shapley"][0] for one in (other, same)]
    assert signs[0] * signs[1] < 0
    with pytest.raises(UnknownName, match="answer"):
        attn("attribute", str(folder), "did you see it", "--target", "answer")


def test_shares_are_told_in_numbers_where_there_are_no_colours(capsys):
    found = {
        "attention": Attribution(torch.tensor([0.25, 0.75]), math.nan),
        "shapley": Attribution(torch.tensor([-1.5, 2.0]), 0.0),
    }
    show(found, ["one", "two"], "one two three", None, json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["one", "+0.25", "-1.50"] in lines
    assert ["two", "+0.75", "+2.00"] in lines
    assert ["sum", "+0.5"] in lines
    page = as_html(["one", "two"], {"shapley": [-1.5, 2.0]}, "", "")
    assert "-1.50</small>" in page
