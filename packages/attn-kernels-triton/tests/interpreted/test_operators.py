"""Attention as an operator of torch: one node of a graph, with shapes and gradients of its own."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from attn_core import Causal, Full, Rotary, Window, configure, installed
from attn_core.distributions import SoftmaxWithSink
from attn_core.dropout import Dropout
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import SPECS, Varlen, VarlenStarts, named_spec, starts
from attn_core.masks import Predicate, Prefix, Strided
from attn_core.modifiers import Alibi, RelativeBias, SoftCap, T5Bias
from attn_kernels_triton.attention.attend import attend
from attn_kernels_triton.attention.operators import attend_named
from attn_kernels_triton.backends.attend import TritonAttend
from attn_variants.attention.kernels import AttentionKernels
from attn_variants.compute.dropout import new_dropout
from calls import Call, results
from engines import model_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

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
    plan = AttentionKernels(spec, "triton_attend")

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
    given = (*rows, [], weights, named_spec(call.spec), NO_DROPOUT)
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
    plan = AttentionKernels(call.spec, "triton_attend")
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


NO_DROPOUT = [0.0, 0.0, 0.0]
DROPPED = Dropout(probability=0.5, seed=7, offset=3, first=2)
PACKED = Varlen((5, 0, 20, 1, 14), (9, 4, 33, 1, 13))


def nodes_of(compiled_of):
    """The operators of ours in the one graph of what `compiled_of` makes with a backend."""
    seen = []

    def look(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    compiled_of(look)
    return [name for name in seen if "attn_kernels_triton" in name]


@pytest.mark.parametrize("label", ["sinks", "a list"])
def test_weights_that_are_dropped_in_a_graph_are_those_that_are_dropped_elsewhere(label):
    torch._dynamo.reset()
    call = CALLS[label]
    operands = call.operands(dropout=DROPPED)
    found, wanted = results(in_graph, call.spec, operands), results(attend, call.spec, operands)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_one_graph_draws_a_seed_for_every_call():
    torch._dynamo.reset()
    call = CALLS["sinks"]
    operands, plan = call.operands(), AttentionKernels(call.spec, "triton_attend")
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def run(query):
        dropout = new_dropout(0.5)
        return plan.run(dataclasses.replace(operands, query=query, dropout=dropout))

    outs = []
    for seed in (1, 2):
        query = operands.query.clone().requires_grad_()
        torch.manual_seed(seed)
        out = run(query)
        change = torch.linspace(-1, 1, out.numel()).view_as(out)
        torch.manual_seed(seed)
        plain = operands.query.clone().requires_grad_()
        wanted = attend(call.spec, dataclasses.replace(operands, query=plain, dropout=new_dropout(0.5)))
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            *(torch.autograd.grad(each, leaf, change)[0] for each, leaf in ((out, query), (wanted, plain))),
            rtol=1e-5,
            atol=1e-6,
        )
        outs.append(out)
    assert counter.frame_count == 1
    assert not torch.allclose(*outs)


PACKED_CALLS = {
    "causal": Call(Causal(), 40, 60, batch=2),
    "dropped": Call(Full(), 40, 60),
    "biases": Call(Causal(), 40, 60, modifiers=(RelativeBias(clip=5),)),
    "a mask that is no band": Call(Causal() & Strided(3), 40, 60, distribution=SoftmaxWithSink()),
}


@pytest.mark.parametrize(("label", "as_tensors"), [("causal", False), *((label, True) for label in PACKED_CALLS)])
def test_packed_documents_in_a_graph_give_the_same_outputs_and_gradients(label, as_tensors):
    torch._dynamo.reset()
    call = PACKED_CALLS[label]
    operands = call.operands(varlen=PACKED, dropout=DROPPED if label == "dropped" else None)
    wanted = results(attend, call.spec, operands)
    if as_tensors:
        tensors = VarlenStarts(*(torch.tensor(starts(each)) for each in (PACKED.queries, PACKED.keys)))
        operands = dataclasses.replace(operands, varlen=tensors)
    found = results(in_graph, call.spec, operands)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("given", [{"dropout": DROPPED}, {"varlen": PACKED}, {"varlen": PACKED, "dropout": DROPPED}])
def test_dropout_and_documents_are_part_of_the_one_node(given):
    call = PACKED_CALLS["causal"]
    operands, plan = call.operands(**given), AttentionKernels(call.spec, "triton_attend")

    def compiled(look):
        run = torch.compile(
            lambda query: plan.run(dataclasses.replace(operands, query=query)), fullgraph=True, backend=look
        )
        run(operands.query)

    assert len(nodes_of(compiled)) == 1


def test_torch_finds_the_operator_with_seed_and_starts_to_be_what_it_declares():
    call = PACKED_CALLS["causal"]
    operands = call.operands()
    rows = [part.requires_grad_() for part in (operands.query, operands.key, operands.value)]
    places = [*(torch.tensor(starts(each)) for each in (PACKED.queries, PACKED.keys)), torch.tensor(7)]
    said = f"{named_spec(call.spec)} query_starts key_starts seed"
    kinds = "test_schema", "test_faketensor", "test_autograd_registration"
    found = torch.library.opcheck(attend_named, (*rows, places, [], said, [0.5, 3.0, 2.0]), test_utils=kinds)
    assert set(found.values()) == {"SUCCESS"}


def test_starts_that_are_not_those_of_all_rows_are_refused_by_the_operator():
    call = PACKED_CALLS["causal"]
    operands = call.operands()
    rows = operands.query, operands.key, operands.value
    said = f"{named_spec(call.spec)} query_starts key_starts"
    with pytest.raises(InvalidValue, match=r"^varlen.queries"):
        attend_named(*rows, [torch.tensor([0, 39]), torch.tensor([0, 60])], [], said, NO_DROPOUT)


def test_a_layer_over_packed_documents_is_one_graph_for_all_lengths():
    mechanism = installed().mechanisms.get("gqa")
    options = {"hidden_size": 32, "num_heads": 2, "causal": True, "dropout": 0.4, "rotary": Rotary()}
    layer, rows = mechanism.build(configure(mechanism, **options)), torch.randn(1, 40, 32)
    layer.use_kernel("triton_attend")

    def compiled(look):
        run = torch.compile(layer, fullgraph=True, backend=look)
        for lengths in ([20, 20], [1, 30, 9], [7, 3, 10, 20]):
            torch.manual_seed(3)
            wanted = layer(rows, lengths=lengths)
            torch.manual_seed(3)
            found = run(rows, lengths=torch.tensor(lengths))
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    # The first graph is of two documents, the second of any number.
    assert len(nodes_of(compiled)) == 2


def computed_again(forward, *args, **kwargs):
    """What training does with a block whose activations are not kept."""
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_compiled_blocks_over_packed_documents_come_to_the_same_loss_and_gradients():
    torch._dynamo.reset()
    model = model_of("gqa").train()
    model.blocks = model.blocks[:1]
    tokens, found = torch.arange(12)[None] % 7, []
    for block in model.blocks:
        block.attention.use_kernel("triton_attend")
        block.attention.dropout = 0.3
    for compiled in (False, True):
        for block in model.blocks if compiled else ():
            block.forward = partial(computed_again, block.forward)
            block.compile(fullgraph=True, backend="aot_eager")
        torch.manual_seed(5)
        loss = model.next_token_loss(tokens, tokens, -1, lengths=[3, 8, 1])
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
