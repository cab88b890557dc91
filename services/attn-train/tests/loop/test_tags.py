"""Tagged sentences: the CoNLL-U format, words of several tokens, trees, and that tags are learned."""

from __future__ import annotations

import gzip

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_models.loading.encoders import load_classifier
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.treebank import heads_of_pieces, load_tags, read_sentences, treebank_files
from attn_train.records import StopFlag
from attn_train.tasks.base import PADDED
from attn_train.tasks.token_classification import collate, tagging_accuracy
from attn_train.trainer import Trainer
from attn_train.worker import build_model

TEXT = """# sent_id = 1
# text = He doesn't run
1\tHe\the\tPRON\tPRP\t_\t4\tnsubj\t_\t_
2-3\tdoesn't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdoes\tdo\tAUX\tVBZ\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod\t_\t_
4\trun\trun\tVERB\tVB\t_\t0\troot\t_\t_
4.1\tleft\tleft\tVERB\tVBN\t_\t_\t_\t_\t_

1\tdogs\tdog\tNOUN\tNNS\t_\t2\tnsubj\t_\t_
2\trun\trun\tVERB\tVBP\t_\t0\troot\t_\t_
"""
FIELDS = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_seq_len": 32}


@pytest.fixture
def treebank(tmp_path):
    (tmp_path / "en-train.conllu").write_text(TEXT + "\n" + TEXT)
    (tmp_path / "en-dev.conllu.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "notes.txt").write_text("not of the treebank")
    return tmp_path


def test_contracted_and_left_out_words_are_passed_over(treebank):
    training, validation = treebank_files(treebank)
    first, second = read_sentences(validation)
    assert (len(read_sentences(training)), len(training)) == (4, 1)
    assert first.words == ("He", "does", "n't", "run")
    assert first.tags == ("PRON", "AUX", "PART", "VERB")
    assert (first.heads, first.depths) == ((3, 3, 3, -1), (1, 1, 1, 0))
    assert second.depths == (1, 0)


def test_the_tokens_of_a_word_share_its_depth_and_the_first_has_its_tag(treebank):
    found = load_tags(DataConfig(dataset=str(treebank)), 64, "byte_pairs:260")
    one = found.validation[0]
    assert found.names == ["AUX", "NOUN", "PART", "PRON", "VERB"]
    assert found.tokenizer.decode(one.tokens) == " He does n't run"
    lengths = [len(f" {word}") for word in ("He", "does", "n't", "run")]
    classes, depths = [], []
    for length, tag, depth in zip(lengths, ("PRON", "AUX", "PART", "VERB"), (1, 1, 1, 0), strict=True):
        classes += [found.names.index(tag), *[PADDED] * (length - 1)]
        depths += [depth] * length
    assert (list(one.classes), list(one.depths)) == (classes, depths)


def test_the_first_token_of_a_word_depends_on_that_of_its_head_and_the_others_on_it():
    assert heads_of_pieces((2, 0, -1), ((7, 8), (9,), (7, 8, 9))) == (3, 0, 0, -1, 3, 3)


def test_the_tree_is_seen_by_layers_that_take_it_and_is_required(treebank):
    dataset = load_tags(DataConfig(dataset=str(treebank)), 32, "word")
    tokens, keep, depths, heads, _ = collate(dataset.validation)
    model = build_model(tag_spec(treebank, 1, mechanism="dependency"), dataset).eval()
    chain = (torch.arange(tokens.shape[1]) - 1).expand_as(heads)
    assert not torch.allclose(model(tokens, keep, depths, heads), model(tokens, keep, depths, chain))
    with pytest.raises(InvalidValue, match="parses"):
        model(tokens, keep, depths)


def test_padding_is_not_tagged(treebank):
    found = load_tags(DataConfig(dataset=str(treebank)), 64, "byte_pairs:260")
    tokens, keep, depths, heads, goals = collate(found.validation)
    assert tokens.shape == keep.shape == depths.shape == heads.shape == goals.shape
    assert keep.sum(1).tolist() == [len(one.tokens) for one in found.validation]
    assert (goals[~keep] == PADDED).all()


def tag_spec(path, steps, **fields):
    return TrainingConfig(
        model=ModelConfig.of("tagger", FIELDS | fields),
        data=DataConfig(dataset=str(path)),
        optimizer=OptimizerConfig(
            steps=steps, batch_size=4, learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=min(5, steps)
        ),
    )


@pytest.mark.parametrize("fields", [{}, {"positions": "depth"}, {"mechanism": "dependency"}], ids=str)
def test_tags_are_learned_and_the_folder_tags_alike(treebank, record, tmp_path, fields):
    config = tag_spec(treebank, 40, **fields)
    dataset = load_tags(config.data, 32, "word")
    model = build_model(config, dataset)
    Trainer(model, dataset, config).run(record(), StopFlag())
    assert dataset.task(config).final_metrics(model, lambda: None) == {"accuracy": 1.0}
    again, names, tokenizer = load_classifier(dataset.save(tmp_path / "m", model))
    assert names == dataset.names
    assert tokenizer.encode("dogs run") == dataset.tokenizer.encode("dogs run")
    batch = collate(dataset.validation)
    assert tagging_accuracy(again, dataset.validation, 2) == 1
    with torch.inference_mode():
        torch.testing.assert_close(again(*batch[:-1]), model.eval()(*batch[:-1]))


def test_the_tree_is_seen_where_positions_are_depths(treebank):
    dataset = load_tags(DataConfig(dataset=str(treebank)), 32, "word")
    tokens, keep, depths, _, _ = collate(dataset.validation)
    for positions, differs in (("every", False), ("depth", True)):
        model = build_model(tag_spec(treebank, 1, positions=positions), dataset).eval()
        same = torch.equal(model(tokens, keep, depths), model(tokens, keep, depths + 1))
        assert same is not differs


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1\ta\tb", "10 columns"),
        ("2\ta\t_\tX\t_\t_\t0\t_\t_\t_", "numbered"),
        ("1\ta\t_\tX\t_\t_\t7\t_\t_\t_", "the head '7'"),
        ("1\ta\t_\tX\t_\t_\t_\t_\t_\t_", "the head '_'"),
        ("1\ta\t_\tX\t_\t_\t2\t_\t_\t_\n2\tb\t_\tX\t_\t_\t1\t_\t_\t_", "cycle"),
        ("1\ta\t_\tX\t_\t_\t0\t_\t_\t_\n2\tb\t_\tX\t_\t_\t0\t_\t_\t_", "root"),
        ("1\ta\t_\t_\t_\t_\t0\t_\t_\t_", "with tags"),
        ("", "with tags"),
    ],
)
def test_what_is_no_treebank_is_refused(tmp_path, line, said):
    (tmp_path / "x.conllu").write_text(line + "\n")
    with pytest.raises(InvalidValue, match=said):
        load_tags(DataConfig(dataset=str(tmp_path / "x.conllu"), validation_fraction=0.0), 16, "word")


def test_a_folder_without_sentences_to_train_on_is_refused(tmp_path):
    (tmp_path / "x-dev.conllu").write_text(TEXT)
    with pytest.raises(InvalidValue, match="train"):
        treebank_files(tmp_path)
