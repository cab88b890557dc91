"""Whole updates on a GPU that is pretended: what the host waits for, which kernels run, in which types, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_schema.training import TrainingConfig
from attn_train.tasks.base import validation_windows
from attn_train.tasks.language_modeling import TextDataset
from attn_train.trainer import NullReporter, Trainer
from pretend_cuda import PretendCuda, PretendCudaTensor
from pretended_steps import LAYERS, MODELS, PRODUCTS, Seen, gpu, stepped

pytest.importorskip("attn_kernels_triton")

__all__ = ["gpu"]

FUSED = "_scaled_dot_product_cudnn_attention"


@pytest.fixture
def trainer(
    gpu: PretendCuda, text: TextDataset, config: TrainingConfig, changed: Callable[..., TrainingConfig]
) -> Callable[..., Trainer]:
    """Makes a trainer on the pretended GPU, with metrics in every third step, that has made its first two."""

    def make(name: str, **changes: Any) -> Trainer:
        options = {"precision": "bfloat16", "evaluation__logging_steps": 3} | changes
        return stepped(gpu, text, changed(config, model=MODELS[name], **options))

    return make


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_the_host_waits_for_metrics_alone_and_sends_nothing_but_batches(name, precision, trainer, gpu):
    training = trainer(name, precision=precision)
    parts = 2
    waits = []
    for _ in range(4):
        training._one_step(NullReporter())
        assert gpu.copies == parts
        waits.append(dict(gpu.syncs))
        gpu.reset()
    assert waits == [{"_local_scalar_dense": 2}, {}, {}, {"_local_scalar_dense": 2}]


def test_accumulated_batches_and_averages_do_not_wait_either(trainer, gpu):
    training = trainer(
        "llama", optimizer__gradient_accumulation_steps=3, optimizer__ema_decay=0.9, evaluation__logging_steps=30
    )
    training._one_step(NullReporter())
    assert (gpu.copies, gpu.syncs) == (6, Counter())


@pytest.mark.parametrize("name", MODELS)
def test_forwards_and_backwards_multiply_in_bfloat16_what_is_kept_in_float32_on_the_gpu(name, trainer, gpu):
    training = trainer(name)
    gradients = []
    weights = list(training.model.parameters())
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda weight: gradients.append(weight.grad))
    with Seen() as seen:
        training._one_step(NullReporter())
    assert seen.apart == []
    assert seen.types(*PRODUCTS) == {torch.bfloat16}
    moments = [part for state in training._optimizer.state.values() for part in state.values()]
    assert len(gradients) == len(weights)
    assert len(moments) == 3 * len(weights)
    for tensor in (*weights, *gradients, *moments):
        assert isinstance(tensor, PretendCudaTensor)
        assert tensor.dtype == torch.float32


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_layer_attends_by_one_fused_kernel_and_its_gradient_in_bfloat16(name, trainer, gpu):
    training = trainer(name)
    with Seen() as seen:
        training._one_step(NullReporter())
    assert gpu.launches[FUSED] == gpu.launches[f"{FUSED}_backward"] == LAYERS
    rows = [dtypes[:3] for operation, dtypes in seen.operations if operation == FUSED]
    assert rows == [(torch.bfloat16,) * 3] * LAYERS
    assert not {operation for operation, _ in seen.operations if "softmax" in operation}


def test_windows_are_attended_by_programs_of_triton_forwards_and_backwards(trainer, gpu):
    trainer("window")._one_step(NullReporter())
    started = Counter(name.partition("_")[0] for name in gpu.programs.elements())
    assert (started["attend"], started["gradient"]) == (LAYERS, 2 * LAYERS), gpu.programs


@pytest.mark.parametrize("name", ["gla", "deltanet"])
def test_recurrences_go_by_chunks_forwards_and_backwards(name, trainer, gpu):
    trainer(name)._one_step(NullReporter())
    for program in ("recall", "unrecall", "unremember", "gradient_to_channels"):
        assert gpu.programs[program] == LAYERS, gpu.programs
    assert gpu.programs["remember"] == 2 * LAYERS


def test_norms_rotations_gates_and_losses_are_fused_with_their_gradients(trainer, gpu):
    trainer("llama")._one_step(NullReporter())
    expected = {
        "norm_rows": 2 * LAYERS + 1,
        "unnorm_rows": 2 * LAYERS + 1,
        "rotate_rows": 4 * LAYERS,
        "gate_rows": LAYERS,
        "ungate_rows": LAYERS,
        "judge_rows": 1,
    }
    assert {name: gpu.programs[name] for name in expected} == expected


def test_the_optimizer_takes_a_few_kernels_whatever_the_number_of_weights(trainer, gpu):
    trainer("llama")._one_step(NullReporter())
    groups = 2
    assert gpu.launches["_fused_adamw_"] == groups
    assert (gpu.launches["_foreach_norm"], gpu.launches["_foreach_mul_"]) == (1, 1)


@pytest.mark.parametrize(("name", "others"), [("llama", 89), ("gpt2", 105)])
def test_casts_of_a_step_are_those_of_rows_that_products_read_and_of_their_gradients(name, others, trainer, gpu):
    trainer(name)._one_step(NullReporter())
    assert gpu.launches["_foreach_copy_"] == 1, "the weights of all linear layers together"
    # Of each half of a block its normed rows, which all its first products read, and the gradient to what it adds; of
    # the loss its rows and the unembedding, which is the embedding.
    assert gpu.launches["_to_copy"] <= 4 * LAYERS + 2
    assert gpu.launches["copy_"] == 0
    assert gpu.launches.total() - gpu.launches["_to_copy"] <= others


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")  # torch's own, of the pretended GPU
def test_activations_that_are_computed_again_are_multiplied_in_bfloat16_too(trainer, gpu):
    training = trainer("llama", gradient_checkpointing=True)
    with Seen() as seen:
        training._one_step(NullReporter())
    assert seen.types(*PRODUCTS) == {torch.bfloat16}
    assert gpu.syncs == Counter({"_local_scalar_dense": 2})


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_evaluation_attends_by_fused_kernels_and_waits_once_a_batch_for_its_loss(name, trainer, gpu):
    training = trainer(name)
    with Seen() as seen:
        found = training._validation_losses(NullReporter())
    text, config = training._task._text.validation, training.config
    windows = validation_windows(len(text) - 1, config.evaluation.eval_batches, config.model.sequence_length)
    batches = -(-len(windows) // config.optimizer.batch_size)
    assert "validation_loss" in found
    assert gpu.syncs == Counter({"item": batches})
    assert gpu.copies == 2 * batches
    assert gpu.launches[FUSED] + gpu.launches["scaled_dot_product_attention"] == batches * LAYERS
    assert gpu.launches[f"{FUSED}_backward"] == 0
    assert seen.apart == []
    assert seen.types("matmul", *PRODUCTS) == {torch.bfloat16}
    assert training.model.training


def test_a_step_that_reads_a_number_or_leaves_a_tensor_behind_is_found(trainer, gpu):
    training = trainer("gpt2")
    loss = training._task.loss

    def careless(model, batch):
        found = loss(model, batch)
        assert float(found.detach()) >= 0
        return found + (found + torch.zeros(1)).sum()

    training._task.loss = careless
    with Seen() as seen:
        training._one_step(NullReporter())
    assert gpu.syncs["_local_scalar_dense"] == 3
    assert "add" in seen.apart
