"""The page on model families: the plugin that it writes is found, computes LayerScale, is saved, and missed by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attn_core import RaggedBatch, installed
from attn_core.errors import UnknownName
from attn_models.loading import load_model, save_model
from attn_models.sources import convert
from attn_models.weights.checkpoint_folder import write_folder
from attn_testing import DictionaryStore
from safetensors.torch import load_file

PAGE = Path(__file__).resolve().parents[2] / "docs/model-families.md"
BLOCK = re.compile(r"^```python file=(\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CONFIG = {
    "model_type": "layerscale",
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The plugin of the page, installed in a folder of the path as pip does it."""
    folder = tmp_path / "site"
    for name, text in BLOCK.findall(PAGE.read_text("utf-8")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    info = folder / "attn_layerscale-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: attn-layerscale\nVersion: 0.1.0\nRequires-Dist: attn-core\n"
    )
    (info / "entry_points.txt").write_text("[attn.plugins]\nlayerscale = attn_layerscale\n")
    (info / "RECORD").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    installed.cache_clear()
    yield folder
    installed.cache_clear()
    for name in [name for name in sys.modules if name.startswith("attn_layerscale")]:
        del sys.modules[name]


def published(folder):
    """A folder as the authors of such a family would publish it, with random weights."""
    adapter = installed().adapters.get("layerscale")
    torch.manual_seed(0)
    model = adapter.build(adapter.from_hf_config(CONFIG)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(mean=float("norm" in name), std=0.2)
    save_model(folder / "saved", model, layout="layerscale")
    config = {
        key: value for key, value in json.loads((folder / "saved/config.json").read_text()).items() if key != "requires"
    }
    write_folder(folder / "published", config, load_file(folder / "saved/model.safetensors"))
    return model, folder / "published"


def by_hand(tensors, ids):
    """Logits of LayerScale's equation over Llama's parts, from the tensors alone, in float64."""
    at = {name: tensor.double() for name, tensor in tensors.items()}
    hidden, size, count = at["model.embed_tokens.weight"][ids], 8, len(ids)
    angles = torch.arange(count).double()[:, None] * 1e4 ** -(torch.arange(0, size, 2).double() / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def norm(rows, gain):
        return rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain

    def turned(rows):
        a, b = rows.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    for layer in range(2):
        own = {
            name.partition(f"layers.{layer}.")[2]: tensor for name, tensor in at.items() if f"layers.{layer}." in name
        }
        rows = norm(hidden, own["input_layernorm.weight"])
        query, key, value = ((rows @ own[f"self_attn.{n}_proj.weight"].T).view(count, -1, size) for n in "qkv")
        key, value = (x.repeat_interleave(2, 1) for x in (turned(key), value))
        scores = torch.einsum("qhd,khd->hqk", turned(query), key) / size**0.5
        weights = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, value).flatten(1) @ own["self_attn.o_proj.weight"].T
        hidden = hidden + own["self_attn.scale"] * attended
        rows = norm(hidden, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(rows @ own["mlp.gate_proj.weight"].T)
        hidden = hidden + own["mlp.scale"] * (
            (gate * (rows @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
        )
    return norm(hidden, at["model.norm.weight"]) @ at["model.embed_tokens.weight"].T


def test_the_family_of_the_page_computes_its_equation_whole_and_in_steps_and_packed(site, tmp_path):
    _, folder = published(tmp_path)
    converted = convert(folder, tmp_path / "converted", "float32")
    model = load_model(converted).model
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    expected = by_hand(load_file(folder / "model.safetensors"), tokens).float()
    store, done, steps = DictionaryStore(model.state_specs(), "float32"), 0, []
    store.admit(0)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens[None])[0], expected, rtol=0, atol=1e-5)
        for size in (3, 1, 4):
            batch = RaggedBatch.of([size], [done], torch.tensor)
            steps.append(model.logits(model.step(tokens[done : done + size], batch, store.view(batch, [0]))))
            done += size
        torch.testing.assert_close(torch.cat(steps), expected, rtol=0, atol=1e-5)
        for form, most in (("auto", 1e-5), ("int8", 0.05)):
            packed = load_model(converted, quantization=form).model(tokens[None])[0]
            assert (packed - expected).norm() / expected.norm() < most, form


def test_a_saved_folder_says_which_package_reads_it_and_missing_it_is_told(site, tmp_path, monkeypatch):
    model, folder = published(tmp_path)
    assert not {"lm_head.weight", "unembedding.weight"} & load_file(folder / "model.safetensors").keys()
    save_model(tmp_path / "ours", model)  # in the layout of families
    tokens = torch.tensor([[3, 1, 4]])
    for kept in ("saved", "ours"):
        config = json.loads((tmp_path / kept / "config.json").read_text())
        assert config["requires"]["attn-layerscale"] == "0.1.0"
        assert torch.equal(load_model(tmp_path / kept).model(tokens), model(tokens))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(site)])
    installed.cache_clear()
    for kept in ("saved", "ours"):
        with pytest.raises(UnknownName, match=r"made with attn-layerscale 0\.1\.0; pip install attn-layerscale$"):
            load_model(tmp_path / kept)
    with pytest.raises(UnknownName, match=r"'layerscale'.*model-families"):
        load_model(folder)


def test_the_laws_of_the_page_hold(site):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_layerscale.py"]
    done = subprocess.run(
        command, cwd=site, capture_output=True, text=True, check=False, env={**_environment(), "PYTHONPATH": str(site)}
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed", done.stdout)


def _environment():
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1"}
