"""A mixture of experts is trained with the loss that keeps its experts busy, and measured without it."""

from __future__ import annotations

import pytest
import torch
from attn_models.evaluation import next_token_loss
from attn_schema.training import ModelConfig
from attn_train.checkpoint import CheckpointFolder
from attn_train.model import configured
from attn_train.records import StopFlag
from attn_train.tasks.language_modeling import LanguageModelingTask
from attn_train.trainer import Trainer

SHAPE = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 8, "num_experts": 4}


@pytest.fixture
def mixture(text):
    """Makes the same decoder with four experts again and again."""

    def make(balance):
        torch.manual_seed(5)
        family, made = configured(
            ModelConfig(**SHAPE, num_experts_per_tok=2, router_aux_loss_coef=balance), text.model_fields
        )
        return family.build(made)

    return make


def test_what_an_update_lowers_is_the_loss_and_the_imbalance_of_every_layer(mixture, text, config):
    task = LanguageModelingTask(text, config)
    batch = task.next_batch()
    plain, balanced = mixture(0.0).train(), mixture(0.5).train()
    alone = next_token_loss(plain, *batch)
    assert torch.equal(task.loss(plain, batch), alone)
    added = (task.loss(balanced, batch) - alone).item()
    assert added == pytest.approx(2 * 0.5, rel=0.2)  # two layers, nearly even before they have learned


def test_validation_is_measured_without_it(mixture, text, config):
    plain, balanced = (
        LanguageModelingTask(text, config).validation_loss(mixture(weight), 2, lambda: None) for weight in (0, 0.5)
    )
    assert plain == balanced


def test_a_mixture_learns_and_keeps_its_checkpoints(mixture, text, config, record, tmp_path):
    seen = record()
    model = mixture(0.01)
    before = model.blocks[0].feed_forward.router.score.weight.clone()
    Trainer(model, text, config, checkpoints=CheckpointFolder(tmp_path)).run(seen, StopFlag())
    assert seen.losses[30] < seen.losses[1] - 0.5
    assert not torch.equal(model.blocks[0].feed_forward.router.score.weight, before)
    assert seen.checkpoints


def test_biases_of_sigmoid_routers_follow_the_load_and_go_on_from_a_checkpoint(text, config, record, tmp_path):
    def make():
        torch.manual_seed(5)
        further = {"router_bias_update_rate": 0.01, "n_shared_experts": 1}
        model = ModelConfig(**SHAPE, num_experts_per_tok=1, routing="deepseek_v3", model_options=further)
        family, made = configured(model, text.model_fields)
        return family.build(made)

    model = make()
    Trainer(model, text, config, checkpoints=CheckpointFolder(tmp_path)).run(record(), StopFlag())
    biases = model.blocks[0].feed_forward.router.correction
    assert biases.abs().max() >= 0.01
    torch.testing.assert_close(biases / 0.01, (biases / 0.01).round())  # whole numbers of rates
    again = make()
    assert Trainer(again, text, config, checkpoints=CheckpointFolder(tmp_path)).resume()
    assert torch.equal(again.blocks[0].feed_forward.router.correction, biases)
