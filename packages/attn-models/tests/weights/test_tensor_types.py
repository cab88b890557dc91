"""Weights that are no real numbers are refused by the names of their tensors, whatever reads them."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import CheckpointInvalid
from attn_models.adapters.registry import ADAPTERS
from attn_models.loading import load_model, save_model
from attn_models.loading.pooling import read_dense
from attn_models.weights.safetensors_files import FLOATS
from attn_testing.families import FAMILIES
from safetensors.torch import load_file, save_file

NUMBERS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
OTHERS += [torch.uint64, torch.complex64]
TENSORS = ("model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")


@pytest.fixture
def folder(tmp_path):
    sizes = {key: value for key, value in FAMILIES["llama"][""].items() if value is not None}
    adapter = ADAPTERS["llama"]
    saved = save_model(tmp_path / "llama", adapter.build(adapter.from_hf_config(sizes)), layout="llama")
    (saved / "manifest.json").unlink()
    return saved


def stored_as(folder, name, dtype):
    """The folder with this tensor in another dtype."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensors[name].abs().to(dtype)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_a_weight_that_holds_no_real_numbers_is_refused_by_its_name(folder, name, dtype):
    with pytest.raises(CheckpointInvalid) as refused:
        load_model(stored_as(folder, name, dtype))
    assert name in refused.value.message


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_a_weight_in_any_type_of_real_numbers_is_read_as_its_values(folder, dtype):
    model = load_model(stored_as(folder, TENSORS[0], dtype)).model
    expected = load_file(folder / "model.safetensors")[TENSORS[0]].float()
    assert torch.equal(model.state_dict()["norm.weight"], expected)
    assert len(NUMBERS) == len(FLOATS)


@pytest.mark.parametrize(
    "tensors",
    [
        {"linear.weight": torch.ones(3, 4, dtype=torch.int8)},
        {"linear.bias": torch.ones(3)},
        {"linear.weight": torch.ones(3, 4), "linear.bias": torch.ones(2)},
    ],
    ids=["int8", "without a weight", "another bias"],
)
def test_a_dense_module_whose_tensors_do_not_fit_is_refused(tmp_path, tensors):
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointInvalid):
        read_dense(tmp_path, 4)
