import importlib.metadata
import importlib.util
import sys
import types

import attn_sparse.nsa
import pytest
import torch
from attn_core import Step, configure, installed
from attn_core.errors import InvalidValue
from attn_sparse.nsa import branches as selection
from attn_sparse.nsa.options import NsaConfig
from attn_testing import Agreement
from torch.nn.functional import scaled_dot_product_attention

NSA = attn_sparse.nsa.Nsa()
SMALL = {"compress": 4, "stride": 2, "select": 4, "top": 3, "window": 3}


def build(options, **shared):
    torch.manual_seed(0)
    layer = NSA.build(configure(NSA, options, **shared)).double()
    with torch.no_grad():
        for compression in (layer.inner.compress_key, layer.inner.compress_value):
            compression.places.copy_(torch.randn_like(compression.places))
    return layer


def attended(query, keys, values):
    if not keys:
        return torch.zeros_like(query), []
    shares = (torch.stack(keys) @ query / len(query) ** 0.5).softmax(0)
    return shares @ torch.stack(values), shares.tolist()


def phi(compression, rows):
    return compression.output.weight @ torch.relu(compression.mix.weight @ (rows + compression.places).flatten())


def by_loops(layer, rows, options):
    """The equations of the paper, with keys shared by the branches, for one query and one group at a time."""
    heads, inner = layer.spec.heads, layer.inner
    query = (rows @ layer.query.weight.T).view(-1, heads.query, heads.key_size)
    key = (rows @ layer.key.weight.T).view(-1, heads.key_value, heads.key_size)
    value = (rows @ layer.value.weight.T).view(-1, heads.key_value, heads.value_size)
    gates = torch.sigmoid(rows @ inner.gates.weight.T + inner.gates.bias).view(-1, 3, heads.query)
    size, stride, block = options["compress"], options["stride"], options["select"]
    out = torch.zeros(len(rows), heads.query, heads.value_size, dtype=rows.dtype)
    for token in range(len(rows)):
        for group in range(heads.key_value):
            mine = [head for head in range(heads.query) if heads.group_of[head] == group]
            starts = [start for start in range(0, token + 1, stride) if start + size - 1 <= token]
            small = [phi(inner.compress_key, key[start : start + size, group]) for start in starts]
            large = [phi(inner.compress_value, value[start : start + size, group]) for start in starts]
            worth = [0.0] * (token // block + 1)
            for head in mine:
                far, shares = attended(query[token, head], small, large)
                out[token, head] = out[token, head] + gates[token, 0, head] * far
                for start, share in zip(starts, shares, strict=True):
                    for position in range(start, start + size):
                        worth[position // block] += share / stride
            fixed = [token // block, 0, token // block - 1]
            for rank, place in enumerate(fixed):
                if place >= 0 and worth[place] < 1e5:
                    worth[place] = 1e6 - rank
            best = sorted(range(len(worth)), key=lambda b: -worth[b])[: options["top"]]
            chosen = [j for j in range(token + 1) if j // block in best]
            near = list(range(max(0, token - options["window"] + 1), token + 1))
            for branch, seen in ((1, chosen), (2, near)):
                for head in mine:
                    read, _ = attended(query[token, head], list(key[seen, group]), list(value[seen, group]))
                    out[token, head] = out[token, head] + gates[token, branch, head] * read
    return out.flatten(1) @ layer.output.weight.T


@pytest.mark.parametrize(
    "changed", [{}, {"top": 1}, {"top": 2}, {"stride": 4}, {"select": 8, "top": 2}, {"compress": 2}]
)
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2)])
def test_it_equals_a_loop_over_queries_forward_and_gradient(record_property, changed, heads, groups):
    options = SMALL | changed
    layer = build(options, hidden_size=8, num_heads=heads, num_kv_heads=groups)
    rows = torch.randn(22, 8, dtype=torch.float64, requires_grad=True)
    expected, out = by_loops(layer, rows, options), layer(rows[None])[0]
    loops = Agreement(record_property, "nsa", paper="the equations in loops")
    loops.outputs(out, expected, 1e-12)
    probe = torch.randn_like(out)
    wanted = [rows, *layer.parameters()]
    ours, theirs = (torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected))
    loops.gradients(ours, theirs, 1e-11)


def test_with_equal_blocks_a_selected_block_is_worth_its_compressed_share():
    options = NsaConfig(hidden_size=8, compress=2, stride=2, select=2, top=5)
    shares = torch.rand(1, 1, 1, 9, generator=torch.Generator().manual_seed(0))
    chosen = selection.select(shares, torch.tensor([[8]]), 9, options)[0, 0, 0].tolist()
    best = sorted(range(1, 7), key=lambda b: -shares[0, 0, 0, b].item())[:2]
    assert chosen == [8, 0, 7, *best]


@pytest.mark.parametrize(("branch", "options"), [(1, {"top": 9}), (2, {"window": 64})])
def test_a_branch_that_reads_everything_is_causal_attention(record_property, branch, options):
    layer = build(SMALL | options, hidden_size=8, num_heads=2)
    mha = installed().mechanisms.get("mha")
    plain = mha.build(configure(mha, hidden_size=8, num_heads=2)).double()
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "inner" not in name})
    with torch.no_grad():
        layer.inner.gates.weight.zero_()
        layer.inner.gates.bias.fill_(-1000.0)
        layer.inner.gates.bias[2 * branch : 2 * branch + 2] = 1000.0
    same = Agreement(record_property, "nsa", identity="a branch that reads everything is mha")
    same.functions(layer, plain, torch.randn(2, 30, 8, dtype=torch.float64), tolerance=1e-12)


def test_pairs_of_a_query_grow_with_the_blocks_and_the_strides_only():
    config = configure(NSA, {"window": 16}, hidden_size=32, num_heads=4)
    costs = [NSA.cost(config, Step(remembered=keys - 1)).allowed_flops for keys in (1600, 3200)]
    compression = 2 * 4 * 33 * 2 * 8**2
    assert costs[1] - costs[0] == 100 * (compression + 2 * 4 * 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: 0"),
        ({"compress": 24}, "compress: 24 is not allowed; allowed: a multiple of the stride 16"),
        ({"stride": 48}, "compress: 32"),
        ({"select": 40}, "select: 40"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(NSA, options, hidden_size=8)


def test_where_the_chip_cannot_run_a_kernel_of_chosen_blocks_the_next_one_computes(monkeypatch):
    layer, rows = build(SMALL, hidden_size=16, num_heads=2, causal=True), torch.randn(1, 14, 16, dtype=torch.float64)
    wanted = layer(rows)
    kernel = layer.inner.plan.operation.require(dtype=rows.dtype, device="cpu", gradients=False, padded=False)
    tried = []

    def refused(selected, blocks):
        tried.append(selected)
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(kernel, "run", refused, raising=False)
    monkeypatch.setattr(kernel, "unsupported", str, raising=False)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(layer(rows), wanted)
    assert len(tried) == 1


def naive():
    """The plain torch functions of fla-core, without what they import only to run their kernels."""
    pooling = types.SimpleNamespace(mean_pooling=lambda rows, size, _=None: torch.stack(
        [block.mean(1) for block in rows.split(size, 1)], 1))  # fmt: skip
    modules = {"fla": None, "fla.ops": None, "fla.ops.utils": types.SimpleNamespace(prepare_chunk_offsets=None)}
    path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/nsa/naive.py")
    spec = importlib.util.spec_from_file_location("fla_naive_nsa", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, known in {**modules, "fla.ops.utils.pooling": pooling}.items():
            patch.setitem(sys.modules, name, known)
        spec.loader.exec_module(module)
    return module


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:Flash Attention")
@pytest.mark.parametrize("top", [3, 4])
def test_means_are_those_of_fla(record_property, top):
    pytest.importorskip("einops")
    module, block, window = naive(), 4, 5
    # Their window is flash attention's, which needs a GPU.
    module.flash_attn_func = lambda query, key, value, causal, window_size: scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (query, key, value)), enable_gqa=causal,
        attn_mask=torch.ones(query.shape[1], query.shape[1]).tril().triu(-window_size[0]).bool(),
    ).transpose(1, 2)  # fmt: skip
    options = {"compress": block, "stride": block, "select": block, "top": top, "window": window}
    config = configure(
        NSA, options | {"compression": "mean", "gate_bias": False}, hidden_size=128, num_heads=32, num_kv_heads=2
    )
    torch.manual_seed(0)
    layer = NSA.build(config)

    def theirs(rows):
        query, key, value = (
            linear(rows).unflatten(-1, (-1, 4)) for linear in (layer.query, layer.key, layer.value)
        )  # fmt: skip
        gates = layer.inner.gates(rows).sigmoid().unflatten(-1, (3, -1)).unbind(2)
        out = module.naive_nsa(query, key, value, *gates, block_counts=top, block_size=block, window_size=window)
        return layer.output(out.flatten(2))

    same = Agreement(record_property, "nsa", package="fla-core naive_nsa")
    learned = [(weight, weight) for weight in layer.parameters()]
    same.functions(layer, theirs, torch.randn(2, 37, 128), tolerance=2e-4, weights=learned)
