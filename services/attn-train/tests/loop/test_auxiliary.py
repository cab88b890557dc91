"""What layers of attention leave beside their output is added to the training loss, and to no other."""

from __future__ import annotations

import torch
from attn_core import installed
from attn_train.tasks.base import auxiliary_losses


def test_the_reconstruction_loss_of_compressive_memory_is_added_once_in_training(text, config, changed):
    family = installed().models.get("decoder")
    options = {"segment": 2, "memory": 2, "compressed": 2, "rate": 2}
    fields = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 8, "mechanism": "compressive"}
    models = []
    for weight in (0.0, 3.0):
        torch.manual_seed(0)
        chosen = {"options": options | {"reconstruction": weight}, "vocab_size": text.tokenizer.vocab_size}
        models.append(family.build(family.configure({**fields, **chosen})).train())
    plain, judged = models
    task = text.task(config)
    batch = task.next_batch()
    losses = [block.attention.reconstruction_loss for block in judged.blocks]
    assert len(losses) == 2
    torch.testing.assert_close(task.loss(judged, batch), task.loss(plain, batch))
    extra = auxiliary_losses(judged)
    judged(batch[0])
    expected = sum(block.attention.take_auxiliary_loss() for block in judged.blocks)
    assert expected > 0
    torch.testing.assert_close(extra, expected)
    assert all(block.attention.take_auxiliary_loss() is None for block in judged.blocks)
