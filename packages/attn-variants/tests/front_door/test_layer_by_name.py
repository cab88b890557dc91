"""`attn_variants.layer`: any installed mechanism by name, and what its layer shows of itself."""

import copy
import subprocess
import sys

import attn_variants
import pytest
import torch
from attn_core import Capability, installed
from attn_core.errors import InvalidValue, UnknownName
from cases import each


def test_importing_the_package_and_making_a_list_of_its_names_loads_no_torch():
    code = "import attn_variants, sys; dir(attn_variants); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_package_offers_what_it_lists_and_nothing_else():
    for name in attn_variants.__all__:
        assert callable(getattr(attn_variants, name))
        assert name in dir(attn_variants)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = attn_variants.no_such_name


@each("name", installed().mechanisms.names())
def test_every_installed_mechanism_is_built_by_name(name):
    mechanism = installed().mechanisms.get(name)
    layer = attn_variants.layer(name, hidden_size=32, num_heads=4)
    rows = torch.randn(2, 6, 32)
    given = (rows, torch.randn(2, 5, 32)) if mechanism.only_cross else (rows,)
    assert layer(*given).shape == rows.shape
    assert f"mechanism={name!r}" in repr(layer)


def test_shared_fields_and_options_of_the_mechanism_are_given_side_by_side():
    layer = attn_variants.layer("sliding_window", hidden_size=32, num_heads=4, num_kv_heads=2, window=3, causal=False)
    assert (layer.spec.heads.key_value, layer.spec.mask.left, layer.spec.mask.right) == (2, 1, 1)


def test_an_option_that_does_not_exist_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownName, match=r"'windw'.*did you mean 'window'"):
        attn_variants.layer("sliding_window", hidden_size=32, windw=3)
    with pytest.raises(UnknownName, match="unknown mechanism 'gqaa'"):
        attn_variants.layer("gqaa", hidden_size=32)


def test_a_layer_without_a_hidden_size_is_refused():
    with pytest.raises(InvalidValue, match="hidden_size must be given"):
        attn_variants.layer("mha", num_heads=2)


def test_repr_says_mechanism_heads_and_causality():
    layer = attn_variants.layer("gqa", hidden_size=32, num_heads=4, num_kv_heads=2, causal=False, dropout=0.1)
    head = repr(layer).splitlines()[1].strip()
    assert head == (
        "mechanism='gqa', hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, causal=False, dropout=0.1"
    )


def test_notebooks_show_equation_paper_and_mask():
    layer = attn_variants.layer("sliding_window", hidden_size=32, num_heads=4, window=2)
    markdown, page = layer._repr_markdown_(), layer._repr_html_()
    for shown in (markdown, page):
        assert "sliding_window" in shown
        assert "https://arxiv.org/abs/2004.05150" in shown
        assert r"\mathrm{softmax}" in shown
    assert "\n■ ■ · ·" in markdown
    assert page.count("#2a6fb0") == 16 + 15
    assert "<svg" not in attn_variants.layer("performer", hidden_size=32, num_heads=4)._repr_html_()


def test_every_mechanism_shows_its_equation():
    for name in installed().mechanisms.names():
        mechanism = installed().mechanisms.get(name)
        assert "$$" in mechanism._repr_html_(), name
        assert mechanism.name in repr(mechanism)
        assert "0x" not in repr(mechanism)


def test_a_copy_of_a_layer_shows_the_same_and_computes_the_same():
    layer = attn_variants.layer("gqa", hidden_size=32, num_heads=4)
    other, rows = copy.deepcopy(layer), torch.randn(1, 5, 32)
    assert repr(other) == repr(layer)
    assert torch.equal(other(rows), layer(rows))


def test_a_layer_that_attends_to_a_source_is_not_called_causal():
    assert "causal=False, cross=True" in repr(attn_variants.layer("mha", hidden_size=32, num_heads=4, cross=True))


@pytest.mark.parametrize("mechanism", [3, torch.nn.Linear, None])
def test_what_is_no_mechanism_is_refused(mechanism):
    with pytest.raises(InvalidValue, match="the name of a mechanism"):
        attn_variants.layer(mechanism, hidden_size=32, num_heads=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0], "query: 'list'.*floating-point tensor"),
        (torch.ones(2, 5, 32).long(), "query: 'torch.int64'"),
        (torch.ones(5, 32), "query: .5, 32."),
        (torch.ones(2, 5, 31), "of width 32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(given, message):
    with pytest.raises(InvalidValue, match=message):
        attn_variants.layer("gqa", hidden_size=32, num_heads=4)(given)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@each("mechanism", installed().mechanisms)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name(mechanism, layout):
    name = installed().mechanisms.name_of(mechanism)
    rows = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=layout)
    built = attn_variants.layer(name, hidden_size=16, num_heads=4, max_seq_len=16)
    own = {"source": rows} if built.mechanism_config.cross else {}
    for call in (
        lambda: built(rows, **own),
        lambda: attn_variants.MultiheadAttention(16, 4, mechanism=name, bias=mechanism.can(Capability.BIAS))(
            rows, rows, rows
        ),
    ):
        with pytest.raises(InvalidValue) as raised:
            call()
        assert raised.value.metadata["field"] == "query"
