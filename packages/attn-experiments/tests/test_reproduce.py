"""Experiments measure what they say: on data whose answer is known, and all of them at a small share of their steps."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_experiments.claims import claim, claim_of, claims
from attn_experiments.experiments import depth, explanation, lookups, translation
from attn_experiments.report import Curves, Result, Settings, as_text, judged, save, spread

MEASURED = {found.experiment.target: found for found in claims().values() if found.experiment}


@pytest.mark.parametrize("name", [found.name for found in MEASURED.values()])
def test_every_experiment_runs_and_answers_at_a_small_share(name, tmp_path):
    experiment = claim(name).experiment
    result = experiment.load()(Settings(seeds=1, share=0.01))
    assert result.rows
    assert all(row.keys() == result.rows[0].keys() for row in result.rows)
    assert result.because
    written = save(result, name, tmp_path)
    assert json.loads(written[0].read_text("utf-8"))["verdict"] == result.verdict
    assert all(path.stat().st_size > 100 for path in written)


@pytest.mark.parametrize("name", ["CL-12", "CL-19", "CL-22"])
def test_repeats_draw_other_numbers_and_the_same_seeds_the_same(name):
    experiment = claim(name).experiment.load()
    first, again, other = (experiment(Settings(seeds=1, share=0.01, first_seed=seed)).rows for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.nightly
@pytest.mark.parametrize("name", [found.name for found in claims().values() if found.experiment])
def test_every_experiment_gives_the_verdict_on_record(name):
    result = claim(name).experiment.load()(Settings())
    assert result.verdict == claim(name).verdict, result.because


def test_verdicts_are_those_of_the_statements():
    assert judged(all_of={"a": True, "b": True}) == ("holds", "true: a; b")
    assert judged(all_of={"a": True, "b": False}) == ("holds in part", "true: a. false: b")
    assert judged(all_of={"a": False}) == ("does not hold", "false: a")
    with pytest.raises(InvalidValue, match="verdict"):
        Result(rows=[], verdict="perhaps", because="")  # type: ignore[arg-type]


def test_a_claim_is_found_by_any_spelling_and_another_is_refused():
    assert claim("CL-4") is claim("cl4") is claim("4")
    with pytest.raises(UnknownName, match="unknown claim '99'"):
        claim("99")
    with pytest.raises(InvalidValue, match="verdict of claim 7"):
        claim_of({"number": 7, "said": "", "holds": "", "verdict": "maybe"})


@pytest.mark.parametrize(("field", "value"), [("seeds", 0), ("share", 0.0), ("share", 11.0)])
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(InvalidValue, match=field):
        Settings(**{field: value})


def test_the_rule_of_a_language_exchanges_neighbours_and_replaces_words():
    language = translation.Language(exchanged=True)
    assert language.aligned(5) == [1, 0, 3, 2, 4]
    source = torch.tensor([[3, 4, 5]])
    assert language.targets(source).tolist() == [[(7 * 1 + 5) % 40 + 3, (7 * 0 + 5) % 40 + 3, (7 * 2 + 5) % 40 + 3]]


class Oracle:
    """A translator that knows the rule, and stops knowing it after some words; its attention is the alignment."""

    def __init__(self, language, knows):
        self.language, self.knows = language, knows

    def __call__(self, said, sources):
        words = self.language.targets(sources)[:, : said.shape[1]]
        logits = torch.nn.functional.one_hot(words, 50).float()
        logits[:, self.knows :] = torch.nn.functional.one_hot(torch.tensor(49), 50).float()
        return logits

    def attention_maps(self, tokens, layers, source):
        weights = torch.zeros(1, len(tokens), len(source))
        for place, aligned in enumerate(self.language.aligned(len(source))):
            weights[0, place, aligned] = 1.0 if place < self.knows else 0.0
            weights[0, place, (aligned + 2) % len(source)] += 0.0 if place < self.knows else 1.0
        return {0: weights}


@pytest.mark.parametrize(("knows", "expected"), [(10, 1.0), (5, 0.5)])
def test_words_and_alignments_are_counted_as_they_are(knows, expected):
    language = translation.Language(exchanged=True)
    assert translation.right(Oracle(language, knows), language, 10) == pytest.approx(expected)
    hits, weight = translation.found_alignments(Oracle(language, knows), language, 10, sentences=3)
    assert hits == pytest.approx(expected)
    assert weight == pytest.approx(expected)


def test_the_first_telling_word_decides_the_label():
    tokens, labels = explanation.texts(200, torch.Generator().manual_seed(0))
    for text, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        first = next(word for word in text if word < 14)
        assert (first < 8) == bool(label)
    assert 0.4 < labels.float().mean() < 0.6


def test_new_sentences_have_pairs_of_nouns_that_were_not_learned():
    import random

    seen, new = (
        {frozenset(word for word in text if word in {*lookups.ANIMATE, *lookups.PLACES}) for text in texts}
        for texts in (lookups.sentences(400, random.Random(0), new=flag)[0] for flag in (False, True))
    )
    assert not seen & new
    assert len(new) == 12


def test_a_landscape_leaves_the_weights_and_has_its_own_loss_in_the_middle():
    model = depth.stack(0, residual=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tokens = lookups.repeats(4, 0)

    def loss():
        return depth.next_token_loss(model(tokens)[:, :-1], tokens[:, 1:])

    plane = depth.landscape(model, loss, points=3)
    assert plane[1][1] == pytest.approx(loss().item(), abs=1e-6)
    assert plane[0][0] != pytest.approx(plane[1][1], abs=1e-3)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_flat_surface_is_smooth_and_a_jagged_one_is_rough():
    slope = [[float(a + b) for b in range(5)] for a in range(5)]
    jagged = [[float((a + b) % 2) for b in range(5)] for a in range(5)]
    assert depth.roughness(slope) == pytest.approx(0, abs=1e-6)
    assert depth.roughness(jagged) == pytest.approx(2)


def test_directions_are_as_long_as_the_filters_that_they_move():
    model = depth.stack(0, residual=True)
    for direction in depth.directions(model, 0):
        for weight, moved in zip(model.parameters(), direction, strict=True):
            if weight.ndim >= 2:
                torch.testing.assert_close(moved.flatten(1).norm(dim=1), weight.detach().flatten(1).norm(dim=1))


def test_curves_in_characters_rise_where_the_numbers_do():
    curves = Curves(title="t", x="x", y="y", lines={"up": [(1, 0.0), (2, 1.0)], "flat": [(1, 0.0), (2, 0.0)]})
    assert as_text(curves).splitlines()[1:] == ["up    ▁█  0 → 1", "flat  ▁▁  0 → 0"]
    assert spread([0.5]) == "0.50"
    assert spread([3.0, 1.0, 2.0], 0) == "2 (1 to 3)"


def test_the_command_lists_runs_and_refuses(attn, tmp_path):
    listed = json.loads(attn("reproduce", "--json"))
    assert len(listed) == len(claims())
    shown = attn("reproduce", "CL-13", "--share", "0.1", "--out", str(tmp_path))
    assert "Verdict: " in shown
    assert "On record: " in shown
    assert (tmp_path / "CL-13.png").exists()
    repeated = json.loads(attn("reproduce", "CL-12", "--share", "0.05", "--seeds", "1", "--repeat", "2", "--json"))
    assert [row["repeat"] for row in repeated] == [1, 2]
    assert repeated[0]["because"] != repeated[1]["because"]
    with pytest.raises(Incompatible, match="pytest -k cl_6"):
        attn("reproduce", "CL-6")
