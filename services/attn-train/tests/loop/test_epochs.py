"""Examples are drawn without replacement, in batches of similar length, and the same after a stop."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from attn_schema.training import DataConfig, OptimizerConfig, TrainingConfig
from attn_train.tasks.base import Epochs, position_of, restore_position
from small_tasks import chats, completions, images, pairs, tags


@pytest.mark.parametrize("count", [1, 3, 8, 100, 257])
@pytest.mark.parametrize("batch", [1, 8])
def test_after_every_epoch_each_example_was_seen_as_often_as_the_others(count, batch):
    epochs, drawn = Epochs([place % 31 for place in range(count)], batch, seed=3), []
    while len(drawn) < 3 * count + batch:
        drawn += (found := epochs.next_batch())
        assert len(found) == batch
    for past in (1, 2, 3):
        assert Counter(drawn[: past * count]) == dict.fromkeys(range(count), past)
    assert count < 50 or drawn[:count] != drawn[count : 2 * count]


def test_batches_hold_examples_of_similar_length_in_every_epoch_and_none_is_preferred():
    lengths = torch.randint(1, 1000, (1001,), generator=torch.Generator().manual_seed(0)).tolist()
    epochs = Epochs(lengths, 8, seed=1)
    spread = [max(found) - min(found) for _ in range(375) if (found := [lengths[n] for n in epochs.next_batch()])]
    assert sum(later > 600 for later in spread) <= 6, "only those at the end of an epoch are mixed"
    assert sum(spread) / len(spread) < 180


@pytest.mark.parametrize("made", [chats, completions, images, pairs, tags], ids=lambda made: made.__name__)
def test_every_task_goes_on_with_the_examples_that_it_has_not_seen(words, tmp_path, made):
    model, dataset = made(words, tmp_path)
    config = TrainingConfig(model=model, data=DataConfig(dataset="/x"), optimizer=OptimizerConfig(batch_size=4))
    task, again = dataset.task(config), dataset.task(config)
    for _ in range(3):
        task.next_batch()
    restore_position(again, position_of(task))
    for _ in range(12):
        assert all(torch.equal(one, other) for one, other in zip(task.next_batch(), again.next_batch(), strict=True))
