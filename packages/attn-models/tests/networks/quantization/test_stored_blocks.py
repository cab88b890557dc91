"""Models whose weights stay in the blocks of the file that they come from."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from attn_core import installed
from attn_core.errors import CheckpointInvalid, Incompatible
from attn_models.loading import load_model
from attn_models.quantization.block_tensor import BlockTensor
from attn_models.sources import convert
from attn_models.weights.block_layouts import GGUF_LAYOUTS, INT4_ZEROS
from safetensors import safe_open
from safetensors.torch import save_file

TOKENS = torch.arange(3, 40).view(1, -1)


def kernels():
    return [kernel for kernel in installed().linears if kernel.name == "cpu_q4_k_int16"]


@pytest.fixture
def _kernels():
    if not kernels() or kernels()[0].available() is not None:
        pytest.skip("no kernel here multiplies weights in blocks")


@pytest.fixture(scope="module")
def folders(quantised_llama, tmp_path_factory):
    """The model of all formats as it is stored, and dequantised to float32."""
    place = tmp_path_factory.mktemp("blocks")
    return [convert(quantised_llama.path, place / dtype, dtype) for dtype in ("stored", "float32")]


def logits(folder, quantization, dtype="float32"):
    loaded = load_model(folder, dtype, quantization=quantization)
    with torch.no_grad():
        return loaded.model(TOKENS)


def test_a_stored_folder_has_the_bytes_of_the_file(quantised_llama, folders):
    config = json.loads((folders[0] / "config.json").read_text())
    blocks = config["quantization_config"]["blocks"]
    assert set(blocks.values()) == set(GGUF_LAYOUTS)
    assert {name: kind for name, kind in quantised_llama.kinds.items() if kind in GGUF_LAYOUTS} == blocks
    with safe_open(folders[0] / "model.safetensors", "pt") as file:
        for name, kind in blocks.items():
            raw, layout = file.get_tensor(name), GGUF_LAYOUTS[kind]
            assert raw.dtype == torch.uint8
            assert np.array_equal(layout.dequantized(raw.numpy()), quantised_llama.weights[name])


def test_without_packing_nothing_is_lost(folders):
    """In float64, where rounding hides nothing."""
    stored, plain = (logits(folder, "none", "float64") for folder in folders)
    assert torch.equal(stored, plain)


@pytest.mark.usefixtures("_kernels")
def test_what_a_server_packs_unasked_is_far_nearer_to_float64_than_inputs_in_int8(folders):
    """Inputs have seven bits more."""
    exact = logits(folders[1], "none", "float64")
    sixteen, eight = ((logits(folders[0], quantization) - exact).norm() for quantization in ("auto", "int8"))
    assert sixteen < eight / 50
    assert sixteen < exact.norm() / 1000


@pytest.mark.usefixtures("_kernels")
def test_blocks_stay_where_they_take_no_more_bits_than_asked_for(folders):
    kept = {
        quantization: {
            part.form
            for module in load_model(folders[0], quantization=quantization).model.modules()
            for part in [module, *getattr(module, "packed", [])]
            if hasattr(part, "form") and " and " not in part.form
        }
        for quantization in ("auto", "int8", "int4")
    }
    assert {"q4_0_int16", "q4_1_int16", "q4_k_int16", "q6_k_int16"} < kept["auto"]
    assert {"q4_0", "q4_1", "q4_k", "q6_k"} < {name.removesuffix("_tiles") for name in kept["int8"]}
    assert {"q4_0", "q4_1", "q4_k"} < kept["int4"]
    assert "q6_k" not in kept["int4"]


@pytest.mark.usefixtures("_kernels")
def test_rounded_inputs_cost_less_than_requantised_weights(folders):
    exact = logits(folders[1], "none", "float64")
    kept, anew = ((logits(folder, "int8") - exact).norm() for folder in folders)
    assert kept < anew


def test_a_machine_without_such_kernels_dequantises(folders, monkeypatch):
    for kernel in installed().linears:
        if kernel.name.startswith("cpu_"):
            monkeypatch.setattr(type(kernel), "available", lambda _self: "not on this machine")
    exact = logits(folders[1], "none", "float64")
    found = logits(folders[0], "auto").double()
    assert ((found - exact).norm() / exact.norm()).item() < 1e-5
    assert not any(isinstance(p, BlockTensor) for p in load_model(folders[0], quantization="auto").model.parameters())


def test_a_block_tensor_is_its_weights_wherever_no_block_is_asked_for():
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (6, 2 * INT4_ZEROS.nbytes), dtype=np.uint8)
    raw.reshape(6, 2, -1)[:, :, :2] = np.array([0.5], np.float16).view(np.uint8)
    tensor = BlockTensor(torch.from_numpy(raw), INT4_ZEROS)
    plain = tensor.plain()
    assert (tensor.shape, tensor.dtype) == (plain.shape, plain.dtype)
    assert torch.equal(tensor + 1, plain + 1)
    assert torch.equal(torch.ones(2, 64) @ tensor.T, torch.ones(2, 64) @ plain.T)
    parts = torch.split(tensor, [4, 2])
    assert all(isinstance(part, BlockTensor) for part in parts)
    assert torch.equal(torch.cat([part.plain() for part in parts]), plain)
    places = torch.tensor([[5, 0], [2, 5]])
    assert torch.equal(torch.nn.functional.embedding(places, tensor), plain[places])


def changed(folder, target, **fields):
    """The folder with other fields in its `quantization_config`, and no manifest."""
    target.mkdir()
    for path in folder.iterdir():
        if path.name != "manifest.json":
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"].update(fields)
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"version": 2}, Incompatible, r"quantization_config\.version: 2 is not supported; allowed: 1"),
        ({"order": "rows"}, Incompatible, r"quantization_config\.order"),
        ({"blocks": {}}, Incompatible, r"quantization_config\.blocks: \{\}"),
        ({"blocks": {"model.norm.weight": "Q9_0"}}, Incompatible, "blocks: 'Q9_0' .* allowed: Q8_0 or"),
        ({"blocks": {"nobody.weight": "Q8_0"}}, CheckpointInvalid, "'nobody.weight': is missing"),
        ({"blocks": {"model.norm.weight": "Q8_0"}}, CheckpointInvalid, "'model.norm.weight': is F32"),
    ],
)
@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_what_is_not_understood_is_refused_by_name(folders, tmp_path, fields, error, said, quantization):
    with pytest.raises(error, match=said):
        load_model(changed(folders[0], tmp_path / "changed", **fields), quantization=quantization)


@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_a_scale_that_is_no_number_is_refused(folders, tmp_path, quantization):
    folder = changed(folders[0], tmp_path / "changed")
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 -- not a mapping
    blocks = json.loads((folder / "config.json").read_text())["quantization_config"]["blocks"]
    name = next(name for name, kind in blocks.items() if kind == "Q4_K")
    tensors[name][3, 2:4] = torch.tensor([torch.inf], dtype=torch.float16).view(torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=f"'{name}'.* NaN or infinity"):
        load_model(folder, quantization=quantization)


@pytest.mark.usefixtures("_kernels")
def test_a_model_in_blocks_takes_the_memory_of_the_file(folders):
    """Weights of the file, beside an embedding that lies in its file: not those of floats."""
    model = load_model(folders[0], quantization="auto").model
    attention = model.blocks[0].attention.output
    held = attention.weights.numel() + attention.scales.numel() * attention.scales.element_size()
    assert held < 1.1 * attention.inputs * attention.outputs
    assert all(parameter.ndim == 1 for parameter in model.parameters())
