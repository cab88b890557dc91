"""A program that the chip cannot compile is found when its kernel is chosen for a graph, where another computes."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from attn_core import Causal, configure, installed
from attn_core.dropout import Dropout
from attn_core.kernels import dispatch
from attn_core.kernels.recurrence import RecurrenceDispatcher
from attn_core.modifiers import Alibi, T5Bias
from attn_kernels_triton import launch
from attn_kernels_triton.attention.attend import attend
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.recurrence.compute import by_chunks
from attn_variants.attention.kernels import AttentionKernels
from calls import Call, results
from engines import model_of
from test_backward_refused import turns_back
from test_recurrence_operators import RECURRENCES, outcome, recurrence_of
from torch._dynamo.testing import CompileCounterWithBackend
from triton.runtime.errors import OutOfResources

CALLS = {
    "causal of groups": Call(Causal(), 40, 40, heads=(4, 2), batch=2),
    "biases": Call(Causal(), 40, 40, modifiers=(T5Bias(buckets=8, max_distance=20),)),
    "dropped": Call(Causal(), 40, 40, modifiers=(Alibi(),)),
}
REFUSED = {"all": lambda _: True, "backward": turns_back}
DROPPED = Dropout(probability=0.5, seed=7, offset=3, first=2)


@pytest.fixture
def refused(monkeypatch, caplog):
    """Has the chip refuse some programs from now on; gives what was tried and what is said of it."""
    run, tried = Launch.run, []

    def refuse(which):
        def some(self, device):
            if which(self):
                tried.append(self.program.__name__)
                raise OutOfResources(300_000, 232_448, "shared memory")
            run(self, device)

        monkeypatch.setattr(Launch, "run", some)
        return tried, lambda: [said for one in caplog.records if "cannot run on" in (said := one.getMessage())]

    monkeypatch.setattr(launch, "_warm", set())
    monkeypatch.setattr(dispatch, "_said", set())
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING):
        yield refuse


def compiled(backend="aot_eager"):
    """The gradients and output of a plan that chooses by itself, in one graph without a break."""

    def run(spec, operands):
        plan = AttentionKernels(spec)

        @torch.compile(fullgraph=True, backend=backend)
        def of(query, key, value, parameters):
            return plan.run(dataclasses.replace(operands, query=query, key=key, value=value, parameters=parameters))

        return of(operands.query, operands.key, operands.value, dict(operands.parameters))

    return run


@pytest.mark.sweep(3)
@pytest.mark.parametrize("which", REFUSED)
@pytest.mark.parametrize("label", CALLS)
def test_the_next_kernel_computes_in_a_graph_what_the_chip_cannot_and_it_is_said_once(label, which, refused):
    call = CALLS[label]
    operands = call.operands(dropout=DROPPED if label == "dropped" else None)
    wanted = results(attend, call.spec, operands)
    tried, said = refused(REFUSED[which])
    counter = CompileCounterWithBackend("aot_eager")
    for _ in range(2):
        found = results(compiled(counter), call.spec, operands)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert [line.split()[1] for line in said()] == ["triton_attend"]
    assert "shared memory" in said()[0]
    assert len(tried) == 1
    assert counter.frame_count == 1


def test_inductors_graphs_give_way_too(refused):
    call = CALLS["causal of groups"]
    operands = call.operands()
    wanted = results(attend, call.spec, operands)
    _, said = refused(turns_back)
    found = results(compiled("inductor"), call.spec, operands)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert len(said()) == 1


def test_a_kernel_that_was_asked_for_by_name_raises_in_a_graph(refused):
    call = CALLS["causal of groups"]
    operands, plan = call.operands(), AttentionKernels(call.spec, "triton_attend")
    refused(REFUSED["all"])
    run = torch.compile(
        lambda query: plan.run(dataclasses.replace(operands, query=query)), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(OutOfResources):
        run(operands.query)


def test_other_errors_of_an_operator_are_raised(monkeypatch):
    torch._dynamo.reset()
    call = CALLS["causal of groups"]
    operands, plan = call.operands(), AttentionKernels(call.spec)

    def full(*_):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(Launch, "run", full)
    run = torch.compile(lambda query: plan.run(dataclasses.replace(operands, query=query)), backend="aot_eager")
    with pytest.raises(torch.OutOfMemoryError):
        run(operands.query)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("which", REFUSED)
@pytest.mark.parametrize("kind", RECURRENCES, ids=str)
def test_recurrences_of_a_graph_go_by_the_next_kernel_too(kind, which, refused):
    steps, before = recurrence_of(kind)
    wanted = outcome(by_chunks, steps, before)
    tried, said = refused(REFUSED[which])
    plan = RecurrenceDispatcher(installed().kernels)
    run = torch.compile(lambda steps, before: plan.run(steps, before, 8), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for found, one in zip(outcome(run, steps, before), wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-5)
    assert [line.split()[1] for line in said()] == ["triton_chunked"]
    assert len(tried) == 1


@pytest.mark.parametrize("name", ["gqa", "gla"])
def test_compiled_blocks_train_on_a_chip_that_compiles_forward_programs_alone(name, refused):
    model = model_of(name).train()
    model.blocks = model.blocks[:1]
    tokens, found = torch.arange(24)[None] % 7, []
    _, said = refused(lambda program: turns_back(program) and program.program.__name__ not in EAGER)
    for is_compiled in (False, True):
        for block in model.blocks if is_compiled else ():
            block.compile(backend="aot_eager")
        loss = model.training_loss(tokens[:, :-1], tokens[:, 1:])
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    kernels = [line.split()[1] for line in said()]
    assert len(kernels) == len(set(kernels))


EAGER = {"unnorm_rows", "ungate_rows", "rotate_rows"}
"""Backward programs of rows, which graphs do without."""


def test_a_mechanism_that_is_built_gives_way_with_its_own_weights(refused):
    mechanism = installed().mechanisms.get("t5_bias")
    layer = mechanism.build(configure(mechanism, hidden_size=32, num_heads=2, causal=True))
    rows = torch.randn(1, 20, 32)

    def learned(run):
        return torch.autograd.grad(run(rows).square().sum(), list(layer.parameters()))

    wanted = learned(layer)
    refused(turns_back)
    torch.testing.assert_close(learned(torch.compile(layer, backend="aot_eager")), wanted, rtol=1e-3, atol=1e-4)


def test_backward_programs_run_over_zeros_for_each_way_in_which_rows_lie(monkeypatch, programs):
    monkeypatch.setattr(launch, "_warm", set())
    call = Call(Causal(), 20, 20, dtype=torch.float32)

    def backwards(row, first):
        """Backward programs that run in a forward pass over rows this far apart that begin here."""
        operands = call.operands()
        batch, count, heads, size = operands.query.shape
        memory = torch.zeros(first + batch * count * row)
        query = memory.as_strided((batch, count, heads, size), (count * row, row, size, 1), first)
        before = len(programs)
        attend(call.spec, dataclasses.replace(operands, query=query.requires_grad_()))
        return len([name for name in programs[before:] if name.startswith(("attend_delta", "gradient"))])

    heads, size = call.operands().query.shape[2:]
    dense = heads * size
    assert [backwards(row, first) > 0 for row, first in ((dense, 0), (dense + 16, 0), (dense + 3, 0), (dense, 3))] == [
        True,
        False,
        True,
        True,
    ]


def test_gradients_that_lie_otherwise_than_those_that_were_tried_are_copied():
    like = torch.empty(2, 6, 2, 8)
    turned = torch.randn(2, 2, 6, 8).transpose(1, 2)
    found = launch.laid_like(turned, like)
    assert torch.equal(found, turned)
    assert found.stride() == like.stride()
    assert launch.laid_like(like, like) is like
    wide = torch.empty(2, 16, 4, 32).transpose(1, 2)
    assert launch.laid_like(wide, torch.empty(wide.shape)) is wide
