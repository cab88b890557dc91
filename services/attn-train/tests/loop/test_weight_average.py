"""With `ema_decay` the exported model is the average of the weights, and training is that without it."""

from __future__ import annotations

import pytest
import torch
from attn_train.checkpoint import CheckpointFolder, read_checkpoint
from attn_train.records import Stop, StopFlag
from attn_train.trainer import Trainer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY = 0.8


@pytest.fixture
def averaged(config, changed):
    return changed(config, optimizer__ema_decay=DECAY)


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def require_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_the_exported_weights_are_those_of_the_averaged_model_of_torch(bigram, text, config, averaged, record):
    model, seen = bigram(), record()
    oracle = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    seen.on_metrics = lambda _: oracle.update_parameters(model)
    Trainer(model, text, config).run(seen, StopFlag())
    trainer = Trainer(bigram(), text, averaged)
    trainer.run(record(), StopFlag())
    expected, exported = parameters(oracle.module), parameters(trainer.whole_model())
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-6, atol=1e-7)
        assert not torch.allclose(exported[name], parameters(model)[name], rtol=1e-4, atol=1e-5), name


def test_training_is_that_without_it(bigram, text, config, averaged, record):
    plain, seen = record(), record()
    without, trainer = Trainer(bigram(), text, config), Trainer(bigram(), text, averaged)
    without.run(plain, StopFlag())
    trainer.run(seen, StopFlag())
    assert seen.losses == plain.losses
    require_equal(parameters(trainer.model), parameters(without.model))
    assert seen.validation != plain.validation


def test_what_is_evaluated_is_what_is_exported(bigram, text, averaged, config, record):
    trainer, seen = Trainer(bigram(), text, averaged), record()
    trainer.run(seen, StopFlag())
    exported = trainer.whole_model()
    assert Trainer(exported, text, config).validation_loss(averaged.evaluation.eval_batches) == seen.validation[30]


def test_a_resumed_run_exports_the_same_weights_and_checkpoints_keep_both(bigram, text, averaged, record, tmp_path):
    whole, undisturbed = Trainer(bigram(), text, averaged), record()
    whole.run(undisturbed, StopFlag())
    last = parameters(whole.model)
    folder, validation, losses = CheckpointFolder(tmp_path), {}, {}
    for stop_at in (7, 15, 21, None):
        flag, seen = StopFlag(), record()
        seen.on_metrics = lambda step, flag=flag, at=stop_at: flag.set(Stop.SAVE) if step == at else None
        trainer = Trainer(bigram(), text, averaged, checkpoints=folder)
        trainer.resume()
        trainer.run(seen, flag)
        validation |= seen.validation
        losses |= seen.losses
    assert (losses, validation) == (undisturbed.losses, undisturbed.validation)
    again = Trainer(bigram(), text, averaged, checkpoints=folder)
    assert again.resume()
    assert again.run(record(), StopFlag()) is None
    exported = parameters(whole.whole_model())
    require_equal(parameters(trainer.whole_model()), exported)
    require_equal(parameters(again.whole_model()), exported)
    parts = read_checkpoint(folder.newest().path)[1]
    require_equal({name: parts["weights"][name] for name in last}, last)
    require_equal({name: parts["average"][f"average:{name}"] for name in last}, exported)


def test_a_run_without_an_update_exports_its_initial_weights(bigram, text, averaged):
    require_equal(parameters(Trainer(bigram(), text, averaged).whole_model()), parameters(bigram()))
