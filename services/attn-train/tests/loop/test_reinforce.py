"""Layers that sample keys learn their scores: the gradient is on average that of the expected loss, and runs resume.

The expectation is an enumeration of every way to look, in loops over the equations of Xu et al. 2015.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from attn_core import installed
from attn_core.errors import Incompatible
from attn_schema.training import DataConfig, ModelConfig, TrainingConfig
from attn_train.checkpoint import CheckpointFolder
from attn_train.model import check_model
from attn_train.records import Stop, StopFlag
from attn_train.tasks.base import PADDED, auxiliary_losses
from attn_train.tasks.seq2seq import PairDataset, Seq2SeqTask
from attn_train.trainer import Trainer
from torch import nn

FIELDS = {"vocab_size": 7, "max_seq_len": 4, "max_encoder_len": 4, "hidden_size": 3, "embedding": 3, "features": 3}
GRID = {"rows": 1, "columns": 3, "convolutions": 1}


def captioner(mechanism="visual_hard", **values):
    family = installed().models.get("show_attend_tell")
    torch.manual_seed(1)
    model = family.build(family.configure(FIELDS | GRID | {"mechanism": mechanism} | values)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.8)
    return model


def looked(model, held, word, seen, place):
    """log p of each place; and, after a look at `place`, the next input of the output layer and state."""
    layer, query = model.attention, model.ask(held["hidden"][0, 0])
    part = layer.score.named()
    asked = layer.query(query) @ part["query_weight"][0] + part["bias"][0]
    scores = torch.stack(
        [torch.tanh(asked + layer.key(row) @ part["key_weight"][0]) @ part["vector"][0] for row in seen]
    )
    gate = torch.sigmoid(layer.inner.gate(query))
    found = layer.output(gate * layer.value(seen[place]))
    hidden, fresh = model.advance(word[None], held, lambda _: found[None])
    return scores.log_softmax(0), hidden, fresh


def ways_to_look(model, image, tokens, targets):
    """Of every way: its log probability, the log likelihood of the words, and the entropies, summed over the words."""
    encoded = model.read(image[None], [3])
    for places in product(range(3), repeat=len(tokens)):
        held, chance, likelihood, entropy = encoded.start, 0.0, 0.0, 0.0
        for token, target, place in zip(tokens, targets, places, strict=True):
            logs, hidden, held = looked(model, held, model.embedding.weight[token], encoded.memory[0], place)
            chance, entropy = chance + logs[place], entropy - (logs.exp() * logs).sum()
            likelihood = likelihood + model.logits(hidden)[0].log_softmax(0)[target]
        yield chance, likelihood, entropy


def task_of(config):
    empty = PairDataset(training=[((1,), (1, 2))], validation=[], texts=[], tokenizer=None, longest=(4, 4))
    return Seq2SeqTask(empty, config)


def test_the_gradient_of_the_loss_is_on_average_that_of_the_expected_loss(config):
    model = captioner(options={"mean_rate": 0.0}).train()
    image, tokens, targets = torch.tensor([5, 2, 6]), torch.tensor([1, 4]), torch.tensor([3, 0])
    batch = (image[None], torch.ones(1, 3, dtype=torch.bool), tokens[None], targets[None])
    wanted = [*model.attention.parameters(), model.ask.weight, model.embedding.weight]
    ways = list(ways_to_look(model, image, tokens, targets))
    chances = [chance.exp() for chance, _, _ in ways]
    assert sum(chances).item() == pytest.approx(1.0)
    # Xu et al.'s objective: the entropies of the ways that are taken, times 0.002, beside the expected loss.
    exact = sum(-p * log for p, (_, log, _) in zip(chances, ways, strict=True)) / 2
    exact = exact - 0.002 * sum(p.detach() * h for p, (_, _, h) in zip(chances, ways, strict=True)) / 2
    theirs = torch.autograd.grad(exact, wanted, allow_unused=True)
    values = torch.stack([-log for _, log, _ in ways]) / 2
    task, ours = task_of(config), {}
    for seed in range(400):
        torch.manual_seed(seed)
        task.reinforce.restore({"baseline": torch.tensor(-1.3, dtype=torch.float64)})
        loss = task.loss(model, batch)
        way = int((values - loss).abs().argmin())
        assert loss.item() == pytest.approx(values[way].item(), abs=1e-12)
        if way not in ours:
            ours[way] = torch.autograd.grad(loss, wanted, allow_unused=True)
        if len(ours) == len(ways):
            break
    for at, their in enumerate(theirs):
        if their is not None and their.abs().max() > 0:
            mean = sum(chances[way].detach() * found[at] for way, found in ours.items())
            torch.testing.assert_close(mean, their, rtol=0, atol=1e-12)
    assert theirs[-2].abs().max() > 1e-3


def test_the_penalty_is_added_to_the_mean_loss_of_a_word(config):
    image, tokens = torch.randint(7, (2, 3)), torch.randint(7, (2, 4))
    targets = torch.tensor([[1, 2, 3, 4], [5, 6, PADDED, PADDED]])
    batch = (image, torch.ones_like(image, dtype=torch.bool), tokens, targets)
    plain, judged = captioner("visual_soft"), captioner("visual_soft", doubly_stochastic=2.5)
    alpha = torch.stack([plain.attention_maps(tokens[b], [0], image[b])[0][0] for b in range(2)])
    penalty = sum((1 - alpha[b, :words].sum(0)).square().sum() for b, words in enumerate((4, 2)))
    task = task_of(config)
    expected = task.loss(plain, batch) + 2.5 * penalty / 6
    torch.testing.assert_close(task.loss(judged, batch), expected, rtol=0, atol=1e-12)
    judged.take_auxiliary_loss = lambda: 0.25
    assert auxiliary_losses(judged, share=0.5) == 0.125


def sampler(text):
    """A decoder whose layers sample keys."""
    family = installed().models.get("decoder")
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 8, "mechanism": "sampled"}
    return family.build(family.configure({**fields, "vocab_size": text.tokenizer.vocab_size}))


def test_a_run_that_samples_resumes_bit_for_bit_baseline_and_all(text, config, changed, record, tmp_path):
    config = changed(config, optimizer__steps=12, optimizer__warmup_steps=2)
    config = changed(config, optimizer__weight_decay=0.0)
    whole, model = record(), sampler(text)
    before = [block.attention.key.weight.detach().clone() for block in model.blocks]
    Trainer(model, text, config).run(whole, StopFlag())
    assert all((block.attention.key.weight != old).any() for block, old in zip(model.blocks, before, strict=True))
    flag, seen = StopFlag(), record()
    seen.on_metrics = lambda step: flag.set(Stop.SAVE) if step == 6 else None
    Trainer(sampler(text), text, config, checkpoints=CheckpointFolder(tmp_path)).run(seen, flag)
    last, seen = Trainer(sampler(text), text, config, checkpoints=CheckpointFolder(tmp_path)), record()
    assert last.resume()
    last.run(seen, StopFlag())
    assert seen.losses == {step: whole.losses[step] for step in range(7, 13)}


def test_samples_and_multi_token_prediction_are_refused_together(tmp_path):
    fields = {"mechanism": "sampled", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 8}
    model = ModelConfig(**fields, model_options={"num_nextn_predict_layers": 1})
    config = TrainingConfig(model=model, data=DataConfig(dataset="shakespeare"))
    with pytest.raises(Incompatible, match="num_nextn_predict_layers"):
        check_model(config, tmp_path)
