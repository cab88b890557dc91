"""Layers do what any module of torch does: they are moved, differentiated by sample, exported and sharded."""

from __future__ import annotations

import pytest
import torch
from attn_core import Capability, configure, installed
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, vmap

SELF = {Capability.CAUSAL, Capability.BIDIRECTIONAL}
NAMES = sorted(item.name for item in installed().mechanisms)
QUICK = {"mha", "gqa", "mla", "alibi", "sliding_window", "sparsemax", "linear", "retnet", "lsh", "longformer", "cross"}
UNMAPPED = {"moba", "nsa", "low_rank", "positions_added", "positions_concatenated", "ntm"}
"""torch.func allows no hooks on saved tensors, by which blocks are recomputed, no function of autograd without its
batching rule, and no value that the host reads."""
UNEXPORTED = {"moba", "nsa", "local_m", "location", "routing", "clustered", "coverage", "lstmn", "ntm"}
UNEXPORTED |= {"key_value", "key_value_predict"}
"""Their loops over blocks or tokens are unrolled for one length, which torch.export refuses for any other."""
SAMPLES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in NAMES]


def built(name):
    """The layer of a mechanism with default options, in float64, and two inputs for it."""
    mechanism = installed().mechanisms.get(name)
    cross = not SELF & mechanism.capabilities
    config = configure(mechanism, {}, hidden_size=16, num_heads=2, cross=cross, max_seq_len=32)
    torch.manual_seed(0)
    layer = mechanism.build(config).double().eval()
    return layer, [torch.randn(2, 12, 16, dtype=torch.float64) for _ in range(2 if cross else 1)]


@pytest.mark.parametrize("name", SAMPLES)
def test_moved_to_another_type_and_back_a_layer_computes_the_same(name):
    layer, given = built(name)
    exact, weights = layer(*given), {key: value.clone() for key, value in layer.state_dict().items()}
    layer.to(torch.bfloat16).to(torch.float64).load_state_dict(weights)
    torch.testing.assert_close(layer(*given), exact, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", SAMPLES)
def test_gradients_of_each_sample_are_those_of_the_sample_alone(name):
    layer, given = built(name)
    if name in UNMAPPED:
        pytest.skip("torch.func cannot transform it")
    parameters = {key: value.detach() for key, value in layer.named_parameters()}

    def loss(values, *rows):
        return functional_call(layer, values, tuple(row[None] for row in rows)).square().sum()

    each = vmap(grad(loss), in_dims=(None, *[0] * len(given)), randomness="different")(parameters, *given)
    for sample in range(2):
        alone = grad(loss)(parameters, *(rows[sample] for rows in given))
        for key, value in alone.items():
            torch.testing.assert_close(each[key][sample], value, atol=1e-8, rtol=0)


@pytest.mark.parametrize("name", SAMPLES)
def test_an_exported_layer_computes_sequences_of_other_lengths(name):
    layer, given = built(name)
    if name in UNEXPORTED:
        pytest.skip("torch.export cannot capture it for any length")
    sizes = {0: torch.export.Dim("batch", min=2, max=8), 1: torch.export.Dim("tokens", min=3, max=32)}
    program = torch.export.export(layer, tuple(given), dynamic_shapes=tuple(sizes for _ in given), strict=False)
    longer = [torch.randn(3, 20, 16, dtype=torch.float64) for _ in given]
    torch.testing.assert_close(program.module()(*longer), layer(*longer), atol=1e-10, rtol=0)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """One process as a group of its own; parameters are gathered by the hooks of FSDP2 all the same."""
    store = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sharded_layer_computes_and_learns_the_same(name, mesh):
    layer, given = built(name)
    sharded = fully_shard(built(name)[0], mesh=mesh)
    torch.testing.assert_close(sharded(*given), layer(*given), atol=1e-10, rtol=0)
    for each in (layer, sharded):
        torch.autograd.backward(each(*given).square().sum())
    for (key, own), other in zip(layer.named_parameters(), sharded.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), key
        if own.grad is not None:
            torch.testing.assert_close(other.grad.full_tensor(), own.grad, atol=1e-10, rtol=0)
