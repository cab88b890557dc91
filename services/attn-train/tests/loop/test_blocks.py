"""Blocks of a model in training: compiled, and with activations that are computed again."""

from __future__ import annotations

import pytest
import torch
from attn_schema.training import ModelConfig
from attn_train.precision import blocks_of
from attn_train.records import StopFlag
from attn_train.trainer import Trainer
from attn_train.worker import build_model

MODEL = ModelConfig(
    hidden_size=16, num_layers=3, num_heads=2, max_seq_len=8, mechanism="gqa", num_kv_heads=1, dropout=0.2
)


@pytest.fixture
def trained(text, config, changed, record):
    """The losses of a short run, the trainer, and the names of the weights."""

    def train(**options):
        made = changed(config, optimizer__steps=6, model=MODEL, **options)
        trainer = Trainer(build_model(made, text), text, made)
        seen = record()
        trainer.run(seen, StopFlag())
        return list(seen.losses.values()), trainer, set(trainer.model.state_dict())

    return train


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_that_are_computed_again_give_the_same_losses_bit_for_bit(trained, precision):
    kept, _, names = trained(precision=precision)
    again, trainer, others = trained(precision=precision, gradient_checkpointing=True)
    assert again == kept
    assert others == names
    assert len(blocks_of(trainer.model)) == MODEL.num_layers


def test_blocks_are_computed_twice_in_an_update_and_once_elsewhere(trained, text):
    _, trainer, _ = trained(gradient_checkpointing=True)
    calls = []
    attention = trainer.model.blocks[1].attention
    attention.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    tokens, targets = trainer._task.next_batch()
    trainer._task.loss(trainer.model, (tokens, targets)).backward()
    assert len(calls) == 2
    trainer.model.eval()
    trainer._task.loss(trainer.model, (tokens, targets)).backward()
    assert len(calls) == 3


def test_what_is_measured_on_a_cpu_stays_in_float32_where_activations_are_computed_again(trained):
    _, trainer, _ = trained(precision="bfloat16", gradient_checkpointing=True)
    found = trainer.validation_loss(2)
    for block in trainer.model.blocks:
        del block.forward
    assert trainer.validation_loss(2) == found


@pytest.mark.parametrize("again", [False, True])
def test_compiled_blocks_come_to_the_same_losses(trained, monkeypatch, again):
    # The graphs are what is tested, not torch's code generator, which takes a minute.
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: real(self, backend="aot_eager"))
    torch._dynamo.reset()
    found, trainer, names = trained(torch_compile=True, gradient_checkpointing=again)
    monkeypatch.undo()
    wanted, plain, others = trained()
    assert found[0] == pytest.approx(wanted[0], rel=0.05)
    assert names == others
    trainer.model.eval()
    plain.model.eval()
    plain.model.load_state_dict(trainer.model.state_dict())
    tokens, _ = trainer._task.next_batch()
    with torch.no_grad():
        torch.testing.assert_close(trainer.model(tokens), plain.model(tokens), rtol=1e-4, atol=1e-5)
