"""A backward program that the chip cannot compile is found in the forward pass, where another kernel takes over."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from attn_core.kernels import dispatch
from attn_core.plugins.catalog import installed_operation
from attn_kernels_triton import launch
from attn_kernels_triton.launch import Launch
from attn_models.decoder.decoder import Decoder
from engines import VOCABULARY, model_of
from torch import Tensor
from triton.runtime.errors import OutOfResources

TEXT = torch.arange(2 * 18).view(2, 18) * 7 % VOCABULARY
OF_GRADIENTS = ("attend_delta", "gradient", "pad", "un")
"""How the names of backward programs begin, but for rotations, of which one program turns both ways."""
KERNELS = {"gqa": "triton_attend", "t5_bias": "triton_attend", "gla": "triton_chunked", "deltanet": "triton_chunked"}


def turns_back(program: Launch) -> bool:
    """Whether a program is only run to compute gradients."""
    if program.program.__name__ == "rotate_rows":
        return bool(program.call.tile.back.value)
    return program.program.__name__.startswith(OF_GRADIENTS)


@pytest.fixture
def refused(monkeypatch, caplog):
    """A chip that compiles forward programs alone; gives what is said of that, and lists what was tried."""
    run, tried = Launch.run, []

    def forward_alone(self, device):
        if turns_back(self):
            tried.append(self.program.__name__)
            raise OutOfResources(300_000, 232_448, "shared memory")
        run(self, device)

    monkeypatch.setattr(Launch, "run", forward_alone)
    monkeypatch.setattr(launch, "_warm", set())
    monkeypatch.setattr(dispatch, "_said", set())
    installed_operation.cache_clear()
    with caplog.at_level(logging.WARNING):
        yield tried, lambda: [said for one in caplog.records if "cannot run on" in (said := one.getMessage())]
    installed_operation.cache_clear()


def learned(model: Decoder) -> list[Tensor]:
    """The loss and the gradient to every weight, float64."""
    model.zero_grad()
    loss = model.training_loss(TEXT[:, :-1], TEXT[:, 1:])
    loss.backward()
    return [part.detach().double() for part in (loss, *(weight.grad for weight in model.parameters()))]


@pytest.mark.parametrize("name", KERNELS)
def test_where_no_backward_program_compiles_other_kernels_train_and_each_is_said_once(name, refused):
    tried, said = refused
    model = model_of(name).train()
    exact = learned(copy.deepcopy(model).double())
    assert not tried
    for found in (learned(model), learned(model)):
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)
    kernels = [line.split()[1] for line in said()]
    assert len(set(kernels)) == len(kernels)
    assert {KERNELS[name], "triton_rms_norm", "triton_gate"} <= set(kernels)
    assert all("shared memory" in line for line in said())


def test_without_gradients_no_backward_program_is_asked_for(refused):
    tried, said = refused
    model = model_of("gqa")
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            model.training_loss(TEXT[:, :-1], TEXT[:, 1:])
    assert (tried, said()) == ([], [])


def test_backward_programs_run_over_zeros_once_for_each_kind_of_call(monkeypatch, programs):
    monkeypatch.setattr(launch, "_warm", set())
    model = model_of("gqa")

    def backwards() -> int:
        before = len(programs)
        model.training_loss(TEXT[:, :-1], TEXT[:, 1:])
        return len([name for name in programs[before:] if name.startswith(OF_GRADIENTS)])

    assert backwards() > 0
    assert backwards() == 0


def test_checkpointed_layers_find_it_in_the_forward_pass_too(refused):
    tried, _ = refused
    model = model_of("gqa").train()
    exact = learned(copy.deepcopy(model).double())
    block = type(model.blocks[0]).forward

    def checkpointed(self, *args, **kwargs):
        return torch.utils.checkpoint.checkpoint(block, self, *args, use_reentrant=False, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.blocks[0]), "forward", checkpointed)
        torch.testing.assert_close(learned(model), exact, rtol=1e-3, atol=1e-4)
    assert tried
