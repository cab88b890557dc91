"""A mixture of experts is trained with the loss that keeps its experts busy, and measured without it."""

from __future__ import annotations

import pytest
import small_tasks
import torch
from attn_models.evaluation import next_token_loss
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.checkpoint import CheckpointFolder
from attn_train.model import configured
from attn_train.records import StopFlag
from attn_train.tasks.base import auxiliary_losses
from attn_train.tasks.language_modeling import LanguageModelingTask
from attn_train.trainer import Trainer
from attn_train.worker import build_model

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
    assert torch.equal(task.loss(balanced, batch), alone)
    added = auxiliary_losses(balanced).item()
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


@pytest.mark.parametrize("made", [small_tasks.text, small_tasks.completions, small_tasks.chats])
@pytest.mark.parametrize("routing", ["mixtral", "deepseek_v3"])
def test_a_step_of_several_batches_is_that_of_one(words, tmp_path, record, made, routing):
    """Also where the batches have different numbers of tokens, and padding."""
    model, dataset = made(words, tmp_path)
    options = {"router_bias_update_rate": 0.01} if routing == "deepseek_v3" else {}
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 1.0, "routing": routing}
    optimizer = OptimizerConfig(steps=3, batch_size=6, optim="sgd", learning_rate=0.5, warmup_steps=0)
    config = TrainingConfig(
        model=model.replace(**fields, model_options=options), data=DataConfig(dataset="/x"), optimizer=optimizer
    )
    drawn = [dataset.task(config.replace(seed=seed)).next_batch() for seed in range(3)]
    found = []
    for sizes in ([6], [1, 5], [2, 2, 2]):
        steps = config.replace(optimizer=optimizer.replace(gradient_accumulation_steps=len(sizes)))
        trainer = Trainer(build_model(config, dataset).double(), dataset, steps)
        parts = [part for whole in drawn for part in zip(*(tensor.split(sizes) for tensor in whole), strict=True)]
        trainer._task.next_batch = iter(parts).__next__
        seen = record()
        trainer.run(seen, StopFlag())
        found.append((trainer.model.state_dict(), seen.losses))
    for weights, losses in found[1:]:
        assert losses == pytest.approx(found[0][1], abs=1e-12)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, found[0][0][name], rtol=0, atol=1e-12)
