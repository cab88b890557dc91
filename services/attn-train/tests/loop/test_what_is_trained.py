"""Every weight has a gradient or is named; what the optimizers group together; data that was replaced."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import Incompatible
from attn_models.decoder.mixture_of_experts import Router, counted_tokens
from attn_schema.training import DataConfig, OptimizerConfig, TrainingConfig
from attn_train.checkpoint import CheckpointFolder
from attn_train.data.load import data_digest
from attn_train.model import configured
from attn_train.optimizer import decayed, muon_weights
from attn_train.records import Stop, StopFlag
from attn_train.trainer import Trainer
from attn_train.worker import build_model
from small_tasks import DECODER, EVERY


@pytest.mark.parametrize("made", EVERY, ids=lambda made: made.__name__)
def test_every_weight_has_a_gradient_after_a_step_or_is_named(words, tmp_path, record, made):
    model_config, dataset = made(words, tmp_path)
    if model_config.family == "decoder" and dataset.model_fields:
        model_config = model_config.replace(model_options={"num_nextn_predict_layers": 1})
    config = TrainingConfig(model=model_config, data=DataConfig(dataset="/x"), optimizer=OptimizerConfig(steps=1))
    model = build_model(config, dataset)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    seen = record()
    seen.metrics = lambda step, values: None
    Trainer(model, dataset, config).run(seen, StopFlag())
    same = [name for name, tensor in model.named_parameters() if torch.equal(tensor, before[name])]
    said = " ".join(seen.lines)
    assert all(name in said for name in same)
    assert len(same) < len(before) / 2
    assert not any(name.startswith("predictors") for name in same)


def test_the_load_of_experts_is_that_of_the_tokens_without_padding(words, tmp_path):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 1.0}
    family, made = configured(DECODER.replace(**fields), {"vocab_size": 20})
    torch.manual_seed(0)
    model = family.build(made).train()
    tokens = torch.randint(1, 20, (2, 10))
    model(tokens[:, :6])
    (alone,) = (router.take_imbalance() for router in model.modules() if isinstance(router, Router))
    padded = tokens.clone()
    padded[:, 6:] = 0
    kept = torch.arange(10).expand(2, 10) < 6
    with counted_tokens(model, kept):
        model(padded)
    (counted,) = (router.take_imbalance() for router in model.modules() if isinstance(router, Router))
    torch.testing.assert_close(counted, alone)


@pytest.mark.parametrize("made", EVERY, ids=lambda made: made.__name__)
def test_muon_updates_no_table_and_no_output_layer(words, tmp_path, made):
    """Those are the parameters with a row for each token or class."""
    model_config, dataset = made(words, tmp_path)
    model = build_model(TrainingConfig(model=model_config, data=DataConfig(dataset="/x")), dataset)
    chosen, sizes = muon_weights(model), {dataset.model_fields.get(name) for name in ("vocab_size", "classes")}
    assert chosen
    assert any(sizes & set(parameter.shape) for parameter in model.parameters())
    assert not any(sizes & set(parameter.shape) for parameter in chosen)


@pytest.mark.parametrize("made", EVERY, ids=lambda made: made.__name__)
def test_weight_decay_reaches_matrices_of_every_kind_of_model_only(words, tmp_path, made):
    model_config, dataset = made(words, tmp_path)
    model = build_model(TrainingConfig(model=model_config, data=DataConfig(dataset="/x")), dataset)
    chosen = decayed(model)
    assert chosen
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            plain = name == "bias" or "norm" in type(module).__name__.lower()
            assert (parameter in chosen) <= (not plain and parameter.dim() >= 2), (type(module).__name__, name)


def test_weight_decay_reaches_no_bias_that_is_stored_in_two_dimensions():
    family, made = configured(DECODER.replace(mechanism="additive"), {"vocab_size": 20})
    model = family.build(made)
    spared = [name for name, parameter in model.named_parameters() if parameter not in decayed(model)]
    biases = [name for name, parameter in model.named_parameters() if name.endswith("bias") and parameter.dim() == 2]
    assert biases
    assert set(biases) <= set(spared)


def test_a_run_does_not_go_on_with_data_that_was_replaced(bigram, text, config, record, tmp_path):
    file = tmp_path / "words.txt"
    told = config.replace(data=DataConfig(dataset=str(file)))

    def trainer():
        digest = data_digest(told, tmp_path)
        return Trainer(bigram(), text, config, checkpoints=CheckpointFolder(tmp_path / "c"), data_digest=digest)

    file.write_text("key and value")
    flag, seen = StopFlag(), record()
    seen.on_metrics = lambda step: flag.set(Stop.SAVE) if step == 5 else None
    assert trainer().run(seen, flag) is Stop.SAVE
    assert trainer().resume()
    file.write_text("key or value")
    with pytest.raises(Incompatible, match="changed"):
        trainer().resume()
