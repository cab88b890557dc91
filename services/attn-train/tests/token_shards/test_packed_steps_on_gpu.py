"""Updates and evaluations on rows of several documents, on a GPU that is pretended: kernels, types, devices, waits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from attn_schema.prepared import prepared_sources
from attn_schema.training import CheckpointConfig, DataConfig, EvaluationConfig, OptimizerConfig, TrainingConfig
from attn_train.tasks.base import validation_windows
from attn_train.tasks.packed import lengths_of, open_prepared
from attn_train.trainer import NullReporter
from pretend_cuda import PretendCudaTensor
from pretended_steps import LAYERS, MODELS, PRODUCTS, Seen, gpu, stepped

pytest.importorskip("attn_kernels_triton")

__all__ = ["gpu"]

VARLEN = ["gpt2", "llama", "window"]
"""Models whose layers compute all documents at once; recurrences take them one by one."""
BACKWARD = ("attend_delta", "gradient_to_queries", "gradient_to_keys")


@pytest.fixture
def trainer(gpu, prepared, lines, tmp_path):
    def make(name, precision="bfloat16"):
        prepared([lines], tmp_path / "tokens", validation_fraction=0.3)
        data = open_prepared(prepared_sources(str(tmp_path / "tokens")))
        asked = TrainingConfig(
            model=MODELS[name].with_defaults(),
            data=DataConfig(prepared=str(tmp_path / "tokens")),
            optimizer=OptimizerConfig(steps=30, batch_size=4).with_defaults(),
            checkpoint=CheckpointConfig(save_steps=30),
            evaluation=EvaluationConfig(eval_steps=30, eval_batches=2, logging_steps=30),
            precision=precision,
        )
        return stepped(gpu, data, asked)

    return make


@pytest.mark.sweep(lambda name, precision: name)
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_the_host_waits_in_no_step_over_packed_documents(name, precision, trainer, gpu):
    training = trainer(name, precision)
    for _ in range(3):
        training._one_step(NullReporter())
        assert gpu.syncs == Counter()
        gpu.reset()


@pytest.mark.parametrize("name", VARLEN)
def test_documents_of_all_rows_are_attended_in_one_launch_a_layer_and_their_gradients_in_three(name, trainer, gpu):
    training = trainer(name)
    with Seen() as seen:
        training._one_step(NullReporter())
    assert {name: gpu.programs[name] for name in BACKWARD} == dict.fromkeys(BACKWARD, LAYERS)
    assert gpu.programs["attend_forward"] == LAYERS
    assert seen.apart == []
    assert seen.types(*PRODUCTS) == {torch.bfloat16}
    for weight in training.model.parameters():
        assert isinstance(weight, PretendCudaTensor)
        assert weight.dtype == torch.float32


@pytest.mark.parametrize("name", VARLEN)
def test_launches_of_a_step_do_not_grow_with_the_number_of_documents(name, trainer, gpu):
    training = trainer(name)
    counts, documents = [], set()
    for _ in range(4):
        task, drawn = training._task, training._task.next_batch()
        task.next_batch, draw = lambda drawn=drawn: drawn, task.next_batch
        training._one_step(NullReporter())
        task.next_batch = draw
        documents.add(len(lengths_of(drawn[1])))
        counts.append(gpu.total)
        gpu.reset()
    assert len(documents) > 1
    assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("name", VARLEN)
def test_an_evaluation_waits_once_a_batch_for_its_loss_and_makes_no_gradients(name, trainer, gpu):
    training = trainer(name)
    training._validation_losses(NullReporter())  # what is made once, such as rotary tables
    gpu.reset()
    found = training._validation_losses(NullReporter())
    assert "validation_loss" in found
    task, config = training._task, training.config
    (held,) = task._data.validation_sets().values()
    windows = validation_windows(held.tokens - 1, config.evaluation.eval_batches, task._context)
    batches = -(-len(windows) // config.optimizer.batch_size)
    assert gpu.syncs == Counter({"item": batches})
    assert gpu.programs["attend_forward"] == batches * LAYERS
    assert not any(gpu.programs[name] for name in BACKWARD)
    assert training.model.training
