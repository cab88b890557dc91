"""Steps whose gradient is far larger than those before it change nothing, and are counted."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from attn_train.checkpoint import CheckpointFolder
from attn_train.divergence import TrainingDiverged
from attn_train.gradient_norms import FEWEST, WINDOW, GradientNorms
from attn_train.records import Stop, StopFlag
from attn_train.trainer import Trainer


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def counted(record):
    """A report that keeps the count of skipped steps, too."""
    seen = record()
    seen.skipped, own = {}, seen.metrics

    def metrics(step, values):
        seen.skipped[step] = values.get("skipped_steps")
        own(step, values)

    seen.metrics = metrics
    return seen


def scaled(model, factor_of, first=1):
    """`model`, whose gradient of a step is multiplied by `factor_of(step)`; and what to call after each step."""
    factor = [factor_of(first)]
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * factor[0])

    def after(step):
        factor[0] = factor_of(step + 1)

    return model, after


@pytest.mark.parametrize("factor", [1e4, math.inf])
def test_a_step_with_a_far_larger_gradient_changes_neither_weights_nor_moments(
    factor, bigram, text, config, changed, record
):
    model, after = scaled(bigram(), lambda step: factor if step == 20 else 1.0)
    trainer, seen = Trainer(model, text, changed(config, optimizer__max_grad_norm_ratio=50.0)), counted(record)
    weights, moments = {}, {}

    def keep(step):
        after(step)
        weights[step] = parameters(model)
        moments[step] = {id(p): state["exp_avg"].clone() for p, state in trainer._optimizer.state.items()}

    seen.on_metrics = keep
    trainer.run(seen, StopFlag())
    for name, tensor in weights[19].items():
        assert torch.equal(tensor, weights[20][name]), name
        assert not torch.equal(tensor, weights[21][name]), name
    assert all(torch.equal(moment, moments[20][key]) for key, moment in moments[19].items())
    assert (seen.skipped[19], seen.skipped[20], seen.skipped[30]) == (0, 1, 1)
    (line,) = seen.lines
    assert line.startswith("step 20 is skipped")


def test_a_ratio_that_no_step_reaches_changes_no_bit(bigram, text, config, changed, record):
    plain, guarded = counted(record), counted(record)
    Trainer(bigram(), text, config).run(plain, StopFlag())
    Trainer(bigram(), text, changed(config, optimizer__max_grad_norm_ratio=1e9)).run(guarded, StopFlag())
    assert guarded.losses == plain.losses
    assert set(guarded.skipped.values()) == {0}
    assert set(plain.skipped.values()) == {None}


def test_a_resumed_run_skips_the_same_steps(bigram, text, config, changed, record, tmp_path):
    config = changed(config, optimizer__max_grad_norm_ratio=1.5)

    def uneven(step):
        return 4.0 ** (step * 7 % 5)

    model, after = scaled(bigram(), uneven)
    whole = counted(record)
    whole.on_metrics = after
    Trainer(model, text, config).run(whole, StopFlag())
    assert 0 < whole.skipped[30] < 20, "some are skipped, so that forgetting the norms would be seen"
    folder, found, skipped = CheckpointFolder(tmp_path), {}, {}
    for stop_at in (7, 15, 21, None):
        flag, seen = StopFlag(), counted(record)
        model, after = scaled(bigram(), uneven, first=max(found, default=0) + 1)

        def stop(step, after=after, flag=flag, at=stop_at):
            after(step)
            if step == at:
                flag.set(Stop.SAVE)

        seen.on_metrics = stop
        trainer = Trainer(model, text, config, checkpoints=folder)
        trainer.resume()
        trainer.run(seen, flag)
        found |= seen.losses
        skipped |= seen.skipped
    assert found == whole.losses
    assert skipped == whole.skipped


def test_a_run_of_which_no_step_was_done_yet_goes_on(bigram, text, config, changed, record, tmp_path):
    config, folder = changed(config, optimizer__max_grad_norm_ratio=5.0), CheckpointFolder(tmp_path)
    model, _ = scaled(bigram(), lambda _: math.inf)
    flag, seen = StopFlag(), counted(record)
    seen.on_metrics = lambda _: flag.set(Stop.SAVE)
    assert Trainer(model, text, config, checkpoints=folder).run(seen, flag) is Stop.SAVE
    assert seen.skipped == {1: 1}
    again = Trainer(bigram(), text, config, checkpoints=folder)
    assert again.resume()
    seen = counted(record)
    assert again.run(seen, StopFlag()) is None
    assert seen.losses[30] < seen.losses[2]
    assert seen.skipped[2] >= 1


def test_a_loss_that_is_no_number_ends_the_run_at_its_step_though_none_is_measured_there(
    bigram, text, config, changed, record
):
    config = changed(config, optimizer__max_grad_norm_ratio=5.0, evaluation__logging_steps=10)
    model, seen = bigram(), record()

    def poison(step):
        with torch.no_grad():
            model.hidden.weight.fill_(torch.nan)

    seen.on_metrics = poison
    with pytest.raises(TrainingDiverged, match="step 11;"):
        Trainer(model, text, config).run(seen, StopFlag())


def test_the_limit_is_that_of_the_median_of_the_last_hundred():
    draw, seen, norms = random.Random(5), [], GradientNorms(3.0)
    for step in range(3 * WINDOW):
        limit = 3.0 * statistics.median(seen[-WINDOW:]) if step >= FEWEST else math.inf
        assert norms.limit() == limit
        norm = draw.lognormvariate(0.0, 2.0)
        assert norms.too_large(norm) is (norm > limit)
        norms.add(norm, skipped=norms.too_large(norm))
        seen.append(norm)
    assert norms.too_large(math.nan)
    assert norms.too_large(math.inf)
    copied = GradientNorms(3.0)
    copied.restore(norms.state())
    assert (copied.limit(), copied.skipped) == (norms.limit(), norms.skipped)


def test_where_gradients_stay_larger_updates_go_on():
    norms = GradientNorms(3.0)
    for _ in range(WINDOW):
        norms.add(1.0, skipped=False)
    skipped = 0
    while norms.too_large(10.0):
        norms.add(10.0, skipped=True)
        skipped += 1
    assert WINDOW // 2 <= skipped <= WINDOW // 2 + 1
