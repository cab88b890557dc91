"""Recurrences as an operator of torch: one node of a graph, with shapes and gradients of its own."""

from __future__ import annotations

import pytest
import torch
from attn_core import configure, installed
from attn_core.kernels.recurrence import RecurrenceDispatcher, Steps
from attn_kernels_triton.recurrence.compute import by_chunks
from attn_kernels_triton.recurrence.operators import recur

RECURRENCES = [("head", False), ("channel", True)]


def recurrence_of(kind: tuple[str, bool]) -> tuple[Steps, torch.Tensor]:
    """Steps of 20 tokens and a memory to start from."""
    decay, delta_rule = kind
    generator = torch.Generator().manual_seed(3)

    def rows(*size: int) -> torch.Tensor:
        return torch.randn(1, 20, 2, *size, generator=generator)

    steps = Steps(
        query=rows(16),
        key=rows(16) / 4,
        value=rows(18),
        decay=-rows({"head": 1, "channel": 16}[decay]).abs() / 4,
        strength=rows().sigmoid() if delta_rule else None,
    )
    return steps, torch.randn(1, 2, 16, 18, generator=generator)


def given_gradients(steps: Steps, before: torch.Tensor) -> tuple[Steps, torch.Tensor]:
    """The same as leaves."""
    leaves = [None if part is None else part.detach().clone().requires_grad_() for part in (*steps, before)]
    return Steps(*leaves[:5]), leaves[5]


def outcome(run, steps: Steps, before: torch.Tensor) -> list[torch.Tensor]:
    """Output, memory, and the gradients of a sum of both."""
    steps, before = given_gradients(steps, before)
    out, after = run(steps, before)
    (out.square().sum() + after.sum()).backward()
    return [out.detach(), after.detach(), *(part.grad for part in (*steps, before) if part is not None)]


@pytest.mark.parametrize("kind", RECURRENCES, ids=str)
def test_a_recurrence_in_a_graph_gives_the_same_outputs_memory_and_gradients(kind):
    torch._dynamo.reset()
    plan = RecurrenceDispatcher(installed().kernels, "triton_chunked")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(steps, before):
        return plan.run(steps, before, 16)

    steps, before = recurrence_of(kind)
    for found, wanted in zip(outcome(run, steps, before), outcome(by_chunks, steps, before), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_torch_finds_the_operator_of_recurrences_to_be_what_it_declares():
    steps, before = given_gradients(*recurrence_of(("channel", True)))
    kinds = "test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static"
    found = torch.library.opcheck(recur, (*steps, before), test_utils=kinds)
    assert set(found.values()) == {"SUCCESS"}


def test_gradients_of_a_recurrence_go_only_to_what_asks_for_them():
    steps, before = recurrence_of(("head", False))
    value = steps.value.clone().requires_grad_()
    recur(*steps._replace(value=value), before)[0].sum().backward()
    plain = steps.value.clone().requires_grad_()
    by_chunks(steps._replace(value=plain), before)[0].sum().backward()
    torch.testing.assert_close(value.grad, plain.grad)


def test_a_recurrence_of_no_tokens_keeps_its_memory():
    steps, before = recurrence_of(("head", False))
    none = Steps(*(None if part is None else part[:, :0] for part in steps))
    out, after = recur(*none, before)
    assert out.shape == (1, 0, 2, 18)
    assert torch.equal(after, before)


LAYERS = ["gla", *(pytest.param(name, marks=pytest.mark.oracle) for name in ("retnet", "gated_deltanet", "linear"))]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_recurs_is_one_graph_with_the_operator_in_it(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    mechanism = installed().mechanisms.get(name)
    layer = mechanism.build(configure(mechanism, hidden_size=32, num_heads=2, causal=True))
    rows, seen = torch.randn(1, 12, 32), []

    def look(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=look)
    torch.testing.assert_close(compiled(rows), layer(rows), rtol=1e-5, atol=1e-5)
    assert len([found for found in seen if "attn_kernels_triton" in found]) == 1
