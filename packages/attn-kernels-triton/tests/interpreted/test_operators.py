"""Attention as an operator of torch: one node of a graph, with shapes and gradients of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core import Causal, Window
from attn_core.distributions import SoftmaxWithSink
from attn_core.kernels.attend import SPECS, named_spec
from attn_core.masks import Predicate, Prefix
from attn_core.modifiers import Alibi, RelativeBias, SoftCap, T5Bias
from attn_kernels_triton.attention.attend import attend
from attn_kernels_triton.attention.operators import attend_named
from attn_kernels_triton.backends.attend import TritonAttend
from attn_variants.plan import KernelPlan
from calls import Call, results

CALLS = {
    "causal of groups": Call(Causal(), 40, 40, heads=(4, 2), batch=2),
    "bfloat16": Call(Causal(), 40, 40, dtype=torch.bfloat16),
    "window with a cap": Call(Window(left=9), 40, 60, modifiers=(SoftCap(cap=3.0), Alibi())),
    "a list": Call(Causal() | Prefix(20), 40, 60),
    "sinks": Call(Causal(), 40, 40, distribution=SoftmaxWithSink()),
    "biases": Call(Causal(), 40, 40, modifiers=(RelativeBias(clip=5), T5Bias(buckets=8, max_distance=20))),
}


def in_graph(spec, operands, **options):
    """The output of one graph without a break, by a backend that keeps operators as they are."""
    plan = KernelPlan(spec, "triton_attend")

    @torch.compile(fullgraph=True, backend="aot_eager", **options)
    def run(query, key, value, parameters):
        return plan.run(dataclasses.replace(operands, query=query, key=key, value=value, parameters=parameters))

    return run(operands.query, operands.key, operands.value, dict(operands.parameters))


@pytest.mark.parametrize("label", CALLS)
def test_a_compiled_graph_gives_the_same_outputs_and_gradients(label):
    torch._dynamo.reset()
    call = CALLS[label]
    operands = call.operands()
    found, wanted = results(in_graph, call.spec, operands), results(attend, call.spec, operands)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_padding_and_positions_come_with_it():
    torch._dynamo.reset()
    call = Call(Causal(), 8, 20)
    padding = torch.rand(1, 20) > 0.3
    operands = call.operands(
        key_padding_mask=padding, query_positions=torch.arange(12, 20)[None], key_positions=torch.randperm(20)[None]
    )
    found, wanted = results(in_graph, call.spec, operands), results(attend, call.spec, operands)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("label", ["causal of groups", "sinks", "biases"])
def test_torch_finds_the_operator_to_be_what_it_declares(label):
    call = CALLS[label]
    operands = call.operands()
    rows = [part.requires_grad_() for part in (operands.query, operands.key, operands.value)]
    weights = [operands.parameters[name].requires_grad_() for name in call.spec.weights]
    given = (*rows, [], weights, named_spec(call.spec))
    kinds = "test_schema", "test_faketensor", "test_autograd_registration"
    found = torch.library.opcheck(attend_named, given, test_utils=kinds)
    assert set(found.values()) == {"SUCCESS"}


def test_the_operator_is_one_node_of_the_graph():
    torch._dynamo.reset()
    seen = []

    def look(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    call = CALLS["causal of groups"]
    operands = call.operands()
    plan = KernelPlan(call.spec, "triton_attend")
    torch.compile(lambda query: plan.run(dataclasses.replace(operands, query=query)), fullgraph=True, backend=look)(
        operands.query
    )
    assert len([name for name in seen if "attn_kernels_triton" in name]) == 1


def test_specs_that_hold_a_function_have_no_name_and_go_without_the_operator():
    spec = Call(Predicate(lambda query, key: (query + key) % 3 != 1)).spec
    assert named_spec(spec) == ""
    operands = Call(spec.mask).operands()
    assert torch.equal(TritonAttend().run_in_graph(spec, "", operands), attend(spec, operands))


def test_equal_specs_have_one_name_and_others_another():
    first, second, other = (Call(mask).spec for mask in (Window(left=3), Window(left=3), Window(left=4)))
    assert named_spec(first) == named_spec(second) != named_spec(other)
    assert SPECS[named_spec(other)] == other
