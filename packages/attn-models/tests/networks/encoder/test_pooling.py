"""A folder of sentence-transformers gives the vectors that its modules.json describes, or is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible
from attn_models.loading.pooling import POOLS, read_pooling
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.sources.convert import convert
from safetensors.torch import save_file

SIZE = 6
LENGTHS = (5, 1, 3)
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
NORMALIZE = {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}


@pytest.fixture
def write(tmp_path):
    """Writes modules and the options of pooling into a folder, which it returns."""

    def to(pooling, modules=MODULES):
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_Pooling").mkdir(exist_ok=True)
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": SIZE} | pooling))
        return tmp_path

    return to


def by_hand(name, rows):
    """One text's rows, pooled number by number."""
    count, columns = len(rows), list(zip(*rows, strict=True))
    return {
        "cls": rows[0],
        "lasttoken": rows[-1],
        "mean": [sum(column) / count for column in columns],
        "mean_sqrt_len_tokens": [sum(column) / math.sqrt(count) for column in columns],
        "max": [max(column) for column in columns],
        "weightedmean": [
            sum(i * x for i, x in enumerate(column, start=1)) / (count * (count + 1) / 2) for column in columns
        ],
    }[name]


def texts():
    torch.manual_seed(0)
    rows = torch.randn(len(LENGTHS), max(LENGTHS), SIZE, dtype=torch.float64)
    return rows, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


@pytest.mark.parametrize("name", POOLS)
def test_rows_are_pooled_as_the_module_says_and_padding_is_not_seen(name, write):
    rows, keep = texts()
    found = read_pooling(write({"pooling_mode": name}), SIZE)(rows, keep)
    for vector, row, length in zip(found, rows.tolist(), LENGTHS, strict=True):
        expected = torch.tensor(by_hand(name, row[:length]), dtype=torch.float64)
        torch.testing.assert_close(vector, expected / expected.square().sum().sqrt())


def test_several_poolings_lie_side_by_side_before_the_dense_layer(write):
    folder = write({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, [*MODULES, DENSE, NORMALIZE])
    torch.manual_seed(1)
    weight, bias = torch.randn(4, 2 * SIZE), torch.randn(4)
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    activation = "torch.nn.modules.activation.Tanh"
    said = {"in_features": 2 * SIZE, "out_features": 4, "bias": True, "activation_function": activation}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(said))
    pooling, (rows, keep) = read_pooling(folder, SIZE).double(), texts()
    assert pooling.size(SIZE) == 4
    for vector, row, length in zip(pooling(rows, keep), rows.tolist(), LENGTHS, strict=True):
        joined = torch.tensor(by_hand("cls", row[:length]) + by_hand("mean", row[:length]), dtype=torch.float64)
        expected = (weight.double() @ joined + bias).tanh()
        torch.testing.assert_close(vector, expected / expected.norm())


def test_poolings_are_joined_in_the_order_of_a_list(write):
    rows, keep = texts()
    found = read_pooling(write({"pooling_mode": ["mean", "cls"]}), SIZE)(rows, keep)
    for vector, row, length in zip(found, rows.tolist(), LENGTHS, strict=True):
        joined = torch.tensor(by_hand("mean", row[:length]) + by_hand("cls", row[:length]), dtype=torch.float64)
        torch.testing.assert_close(vector, joined / joined.norm())


def test_layers_act_in_their_order_and_dropout_is_left_out(write):
    """Layer norm, then scaling, then a dense layer with SiLU, as sentence-transformers 6 writes them."""
    of = "sentence_transformers.sentence_transformer.modules"
    kinds = [f"{of}.layer_norm.LayerNorm", f"{of}.dropout.Dropout", "sentence_transformers.models.Normalize"]
    more = [{"path": f"{place}", "type": kind} for place, kind in enumerate(kinds, start=3)]
    folder = write({"pooling_mode": "mean"}, [*MODULES, *more, DENSE])
    torch.manual_seed(2)
    gain, shift, weight, bias = torch.randn(SIZE), torch.randn(SIZE), torch.randn(4, SIZE), torch.randn(4)
    for name in ("3", "2_Dense"):
        (folder / name).mkdir()
    save_file({"norm.weight": gain, "norm.bias": shift}, folder / "3" / "model.safetensors")
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    said = {"activation_function": "torch.nn.modules.activation.SiLU", "module_input_name": "sentence_embedding"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(said))
    rows, keep = texts()
    pooling = read_pooling(folder, SIZE).double()
    pooling.truncate_dim = 3
    assert pooling.size(SIZE) == 3
    for vector, row, length in zip(pooling(rows, keep), rows.tolist(), LENGTHS, strict=True):
        mean = torch.tensor(by_hand("mean", row[:length]), dtype=torch.float64)
        normed = (mean - mean.mean()) / (mean.var(correction=0) + 1e-5).sqrt() * gain + shift
        wide = weight.double() @ (normed / normed.norm()) + bias
        expected = (wide * wide.sigmoid())[:3]
        torch.testing.assert_close(vector, expected / expected.norm())


@pytest.mark.parametrize(
    ("pooling", "modules", "named"),
    [
        ({"pooling_mode": "median"}, MODULES, "pooling median is not allowed; allowed: cls"),
        ({}, MODULES, "pooling none"),
        ({"pooling_mode": "mean", "temperature": 2}, MODULES, "unknown keys temperature"),
        ({"pooling_mode": "mean", "word_embedding_dimension": 9}, MODULES, "hidden states of 9 elements"),
        ({"pooling_mode": "mean"}, [*MODULES, DENSE | {"type": "my.Own"}], "unknown module 'my.Own'"),
        ({"pooling_mode": "mean"}, MODULES[:1], "modules Transformer are not allowed"),
        ({"pooling_mode": "mean"}, [*MODULES, MODULES[1]], "not allowed; allowed: Transformer"),
        ({"pooling_mode": "mean"}, [MODULES[0], MODULES[1] | {"path": "../1_Pooling"}], "not the name of a file"),
        ({"pooling_mode": "mean"}, {"modules": []}, "not a list of modules"),
    ],
)
def test_what_is_not_known_is_refused_by_name(pooling, modules, named, write):
    with pytest.raises(CheckpointInvalid, match=named):
        read_pooling(write(pooling, modules), SIZE)


def test_modules_with_weights_elsewhere_are_refused_before_weights_are_looked_for(tmp_path):
    router = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.router.Router"}
    (tmp_path / "modules.json").write_text(json.dumps([router]))
    with pytest.raises(CheckpointInvalid, match=r"unknown module .*Router"):
        load_sentence_encoder(tmp_path)


def test_a_conversion_that_would_lose_the_pooling_is_refused(write, tmp_path):
    folder = write({"pooling_mode": "cls"})
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": SIZE}))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(Incompatible, match=r"pooling of its modules\.json"):
        convert(folder, tmp_path / "converted")
