"""Layers that read the same rows are one product on a GPU: gradients, launches, and what is left to separate ones."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from attn_core.joint import joint_outputs
from attn_models.decoder.decoder import Decoder
from attn_train import fused_linears
from attn_train.fused_linears import can_join, have_plain_parameters, join_products, joined
from attn_train.gpu_products import HalfWeights
from attn_train.model import configured
from attn_train.precision import blocks_of, forward_precision
from attn_train.trainer import NullReporter
from pretend_cuda import DEVICE, PretendCudaTensor, pretended_gpu, to_pretended, unwrapped
from pretended_steps import LAYERS, MODELS, PRODUCTS, Seen, stepped
from torch import nn

SIZES = (40, 16, 24)


@pytest.fixture
def gpu():
    with pretended_gpu() as counter:
        yield counter


class Read(nn.Module):
    """Layers of one input, as a block has them."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def joint_layers(self):
        return list(self.layers)

    def forward(self, rows):
        return joint_outputs(rows, self.joint_layers(), joined)


def read(*, bias=True):
    torch.manual_seed(1)
    module = Read(*(nn.Linear(32, size, bias=bias) for size in SIZES))
    to_pretended(module)
    return module


def learned(module, halves, rows, changes, names=PRODUCTS):
    """Outputs and gradients to rows and weights, on the CPU, and how many products were launched."""
    module.zero_grad()
    leaf = PretendCudaTensor(rows).requires_grad_()
    with Seen() as seen:
        with forward_precision("bfloat16", DEVICE, halves):
            outs = module(leaf)
        found = torch.autograd.grad(outs, [leaf, *module.parameters()], [PretendCudaTensor(part) for part in changes])
    launches = [name for name, _ in seen.operations if name in names]
    return [unwrapped(part.detach()) for part in (*outs, *found)], Counter(launches)


def given():
    generator = torch.Generator().manual_seed(5)
    changes = [torch.randn(3, 7, size, generator=generator).bfloat16() for size in SIZES]
    return torch.randn(3, 7, 32, generator=generator), changes


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_separate_products_and_three_products_compute_all(gpu, bias):
    module, (rows, changes) = read(bias=bias), given()
    halves = HalfWeights(module)
    halves.refresh()
    found, launches = learned(module, halves, rows, changes)
    apart, more = learned(module, None, rows, changes)
    assert (launches.total(), more.total()) == (3, 9)
    exact = [unwrapped(part.detach()).bfloat16().double().requires_grad_() for part in module.parameters()]
    leaf = rows.bfloat16().double().requires_grad_()
    pairs = [exact[index : index + 1 + bias] for index in range(0, len(exact), 1 + bias)]
    outs = [nn.functional.linear(leaf, *pair) for pair in pairs]
    wanted = [*outs, *torch.autograd.grad(outs, [leaf, *exact], [change.double() for change in changes])]
    assert len(found) == len(apart) == len(wanted)
    for index, (ours, other, true) in enumerate(zip(found, apart, wanted, strict=True)):
        assert (ours.dtype, ours.shape) == (other.dtype, other.shape)
        errors = [float((part.double() - true).detach().norm() / true.detach().norm()) for part in (ours, other)]
        assert errors[0] <= (4e-3 if index < len(SIZES) else 1e-6), (index, errors)
        if index < len(SIZES):
            assert torch.equal(ours, other)


def test_weights_that_an_update_changed_are_those_of_the_next_step(gpu):
    module, (rows, changes) = read(), given()
    halves = HalfWeights(module)
    names = list(module.state_dict())
    for _ in range(2):
        with torch.no_grad():
            for part in module.parameters():
                part.mul_(2)
        halves.refresh()
        found, launches = learned(module, halves, rows, changes)
        assert launches.total() == 3
        for ours, other in zip(found, learned(module, None, rows, changes)[0], strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)
        for part in module.parameters():
            assert torch.equal(unwrapped(halves.of(part)), unwrapped(part.detach()).bfloat16())
    assert list(module.state_dict()) == names
    assert {part.dtype for part in module.state_dict().values()} == {torch.float32}


def with_hook(module):
    module.layers[0].register_forward_hook(lambda *_: None)


def with_adapter(module):
    module.layers[1].adapted_weight = lambda: module.layers[1].weight


def without_one_bias(module):
    module.layers[2].bias = None


def frozen_in_part(module):
    module.layers[0].weight.requires_grad_(requires_grad=False)


def shared(module):
    module.layers[2] = module.layers[1]


def of_one_bias(module):
    module.layers[2].bias = module.layers[1].bias


def with_backward_hook(module):
    module.layers[0].register_full_backward_hook(lambda *_: None)


def of_another_type(module):
    module.layers[1].double()


def of_another_class(module):
    class Other(nn.Linear):
        pass

    module.layers[0].__class__ = Other


ALTERED = [
    with_hook,
    with_backward_hook,
    with_adapter,
    without_one_bias,
    of_one_bias,
    frozen_in_part,
    shared,
    of_another_type,
    of_another_class,
]


@pytest.mark.parametrize("alter", ALTERED)
@pytest.mark.parametrize("late", [False, True])
def test_layers_that_are_not_of_one_kind_are_called_one_by_one(alter, late):
    module = Read(*(nn.Linear(32, 16) for _ in SIZES))
    assert can_join(module.joint_layers())
    if late:
        halves = HalfWeights(module)
        assert halves.joint_of(module.joint_layers()) is not None
    alter(module)
    assert not can_join(module.joint_layers())
    if not late:
        assert HalfWeights(module).joint_of(module.joint_layers()) is None


def test_weights_of_another_model_are_not_joined_with_what_lies_side_by_side(gpu):
    module, other, (rows, changes) = read(), read(), given()
    halves = HalfWeights(other)
    halves.refresh()
    assert learned(module, halves, rows, changes)[1].total() == 9


def products_of_step(gpu, text, asked):
    training = stepped(gpu, text, asked)
    with Seen() as seen:
        training._one_step(NullReporter())
    return Counter(name for name, _ in seen.operations if name in PRODUCTS).total(), gpu.launches.total()


# Queries, keys and values are one product and not three; so are gates and what they let through.
@pytest.mark.parametrize(
    ("name", "fewer", "products", "most"),
    [("llama", 3, 27, 99), ("gpt2", 2, 27, 115), ("window", 3, 27, 97), ("gla", 2, 45, 194), ("deltanet", 3, 33, 293)],
)
def test_a_step_launches_three_products_for_each_joint_matrix(
    name, fewer, products, most, gpu, text, config, changed, monkeypatch
):
    asked = changed(config, model=MODELS[name], precision="bfloat16", evaluation__logging_steps=30)
    found, launches = products_of_step(gpu, text, asked)
    monkeypatch.setattr(fused_linears, "can_join", lambda _: False)
    apart, more = products_of_step(gpu, text, asked)
    assert apart - found == 3 * fewer * LAYERS
    assert found == products
    assert launches <= most < more


@pytest.mark.parametrize(
    ("name", "products"), [("llama", (7, 4)), ("gpt2", (6, 4)), ("gla", (9, 7)), ("deltanet", (8, 5))]
)
def test_compiled_blocks_join_products_in_one_graph_and_learn_the_same(name, products):
    family, made = configured(MODELS[name], {"vocab_size": 30})
    torch.manual_seed(0)
    model: Decoder = family.build(made).train()
    tokens = torch.arange(2 * 17).view(2, 17) * 7 % 30
    found, counts = [], []

    def counting(graph, inputs):
        counts[-1].add(sum(node.target is torch._C._nn.linear for node in graph.graph.nodes))
        return graph

    for joins in (False, True):
        torch._dynamo.reset()
        counts.append(set())
        if joins:
            join_products(model)
        for block in blocks_of(model):
            block.compile(backend=counting, fullgraph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.training_loss(tokens[:, :-1], tokens[:, 1:])
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert [min(each) for each in counts] == [max(each) for each in counts] == list(products)
    for apart, joint_one in zip(*found, strict=True):
        assert float((apart - joint_one).detach().norm()) <= 2e-2 * float(apart.detach().norm()), apart.shape


def test_weights_of_other_types_are_joined_neither_in_graphs_nor_in_bfloat16_memory():
    class Sharded(torch.Tensor):
        pass

    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    assert have_plain_parameters(layers)
    layers[1].weight = nn.Parameter(layers[1].weight.detach().as_subclass(Sharded))
    assert not have_plain_parameters(layers)


def test_within_a_mode_without_weights_in_bfloat16_layers_are_called_one_by_one_and_outside_too(gpu):
    module, (rows, _) = read(), given()
    leaf = PretendCudaTensor(rows)
    with Seen() as seen:
        module(leaf)
        with forward_precision("bfloat16", DEVICE):
            module(leaf)
    assert [name for name, _ in seen.operations].count("addmm") == 2 * len(SIZES)
