"""Quantised folders of families that only transformers builds have its logits with the plain weights."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core import installed
from attn_models.loading import load_model
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")


def int8(weight):
    codes, scales = torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.rand(len(weight)) / 8
    return {"weight": codes, "SCB": scales}, codes.float() * (scales / 127)[:, None]


def awq(weight):
    """As AutoAWQ packs, but zero points are 8 and words are drawn: the plain weights are read off them."""
    words = torch.randint(-(2**31), 2**31, (weight.shape[1], weight.shape[0] // 8), dtype=torch.int32)
    scales = torch.randint(1, 9, (weight.shape[1] // 32, len(weight))).half() / 256
    numbers = torch.stack([words >> 4 * place & 15 for place in (0, 4, 1, 5, 2, 6, 3, 7)], -1).flatten(1)
    zeros = torch.full((len(scales), words.shape[1]), -0x77777778, dtype=torch.int32)
    return {"qweight": words, "qzeros": zeros, "scales": scales}, (
        (numbers - 8) * scales.repeat_interleave(32, 0).float()
    ).T


FORMS = {
    "bitsandbytes": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, 1e-5),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, 1e-3),
}


@pytest.mark.parametrize("form", FORMS)
def test_quantised_folders_load_through_transformers(form, tmp_path):
    torch.manual_seed(0)
    store, said, bound = FORMS[form]
    sizes = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    peer = transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**sizes, **heads, num_local_experts=2))
    peer.save_pretrained(tmp_path)
    stored, plain = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if "_proj" in name:
            parts, plain[name] = store(tensor)
            stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[name] = plain[name] = tensor
    peer.load_state_dict(plain, strict=False)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    tokens = torch.arange(12)[None]
    expected = peer.eval()(tokens).logits
    torch.testing.assert_close(load_model(tmp_path).model(tokens), expected, rtol=1e-5, atol=1e-5)
    served = load_model(tmp_path, quantization="auto")
    torch.testing.assert_close(served.model(tokens), expected, rtol=bound, atol=bound)
    forms = " ".join(str(getattr(module, "form", "")) for module in served.model.modules())
    multiplied = any(kernel.weights == "int4_zeros" for kernel in installed().linears)
    assert ("int4_zeros" in forms) == (multiplied and form == "awq"), forms
