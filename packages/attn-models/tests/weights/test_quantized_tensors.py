"""GPTQ, AWQ, FP8 and MXFP4 folders give the numbers of their formats, packed here by loops; all else is refused."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.quantization.block_tensor import BlockTensor
from attn_models.sources import convert
from attn_models.weights import read_folder
from attn_models.weights.checkpoint_folder import write_folder
from attn_models.weights.quantized_tensors import format_of, with_plain_weights
from attn_schema.decoder import DecoderConfig
from safetensors.torch import load_file, save_file

# With importlib mode a test file cannot import its neighbour.
sys.path.insert(0, str(Path(__file__).parent))
from packed_forms import E4M3, BitsAndBytes, Floats, Gemv, Int8, Integers, TorchAo, compressed, words_of

SIZES = {"vocab_size": 48, "max_seq_len": 32, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
KIND = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "mechanism": "mha", "intermediate_size": 128}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Llama's config.json and tensors."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain") / "model"
    save_model(folder, Decoder(DecoderConfig.from_plain(SIZES | KIND)), layout="llama")
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def is_linear(name):
    return name.endswith("_proj.weight")


class Gptq:
    def __init__(self, bits=4, group_size=32, form="gptq", *, shuffled=False):
        self.bits, self.form, self.shuffled, self.group_size = bits, form, shuffled, group_size
        self.config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "desc_act": shuffled,
            "sym": False,
        }
        self.config |= {"checkpoint_format": form} if form else {}

    def store(self, layer, weight, random):
        outputs, inputs = weight.shape
        size = inputs if self.group_size == -1 else self.group_size
        groups = math.ceil(inputs / size)
        numbers = torch.from_numpy(random.integers(0, 2**self.bits, (inputs, outputs)))
        zeros = torch.from_numpy(random.integers(0, 2**self.bits, (groups, outputs)))
        scales = torch.from_numpy(random.uniform(0.01, 0.02, (groups, outputs))).half()
        group = torch.arange(inputs) // size
        if self.shuffled:
            group = group[torch.from_numpy(random.permutation(inputs))]
        kept = words_of(zeros, self.bits)
        if self.form != "gptq_v2" and self.bits == 3:
            kept = words_of((zeros - 1) % 8, 3)
        elif self.form != "gptq_v2":  # as GPTQModel: words minus a word of ones
            kept -= words_of(torch.ones(1, 32, dtype=torch.int64), self.bits)[0, 0]
        stored = {
            f"{layer}.qweight": words_of(numbers.T, self.bits).T.contiguous(),
            f"{layer}.qzeros": kept,
            f"{layer}.scales": scales,
            f"{layer}.g_idx": group.int(),
        }
        weight = torch.empty(outputs, inputs)
        for i in range(inputs):
            g = int(group[i])
            weight[:, i] = scales[g].float() * (numbers[i] - zeros[g]).float()
        return stored, weight


class Varied(Gptq):
    """With `dynamic`: attention in 8 bits with groups of its own."""

    def __init__(self):
        super().__init__()
        self.config |= {"dynamic": {"+:.*self_attn.*": {"bits": 8, "group_size": 16}}}

    def store(self, layer, weight, random):
        return (Gptq(8, 16) if "self_attn" in layer else Gptq()).store(layer, weight, random)


class Awq:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

    @staticmethod
    def packed(numbers):
        """As AutoAWQ packs: in each word, place i holds the output order[i]."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        mixed = numbers.view(len(numbers), -1, 8)[:, :, order].flatten(1)
        return words_of(mixed, 4)

    def store(self, layer, weight, random):
        outputs, inputs = weight.shape
        numbers = torch.from_numpy(random.integers(0, 16, (inputs, outputs)))
        zeros = torch.from_numpy(random.integers(0, 16, (inputs // 32, outputs)))
        scales = torch.from_numpy(random.uniform(0.01, 0.02, (inputs // 32, outputs))).half()
        stored = {
            f"{layer}.qweight": self.packed(numbers),
            f"{layer}.qzeros": self.packed(zeros),
            f"{layer}.scales": scales,
        }
        weight = torch.empty(outputs, inputs)
        for i in range(inputs):
            weight[:, i] = scales[i // 32].float() * (numbers[i] - zeros[i // 32]).float()
        return stored, weight


class Fp8:
    def __init__(self, config, scales, name="weight_scale", activations=()):
        self.config, self.scales, self.name, self.activations = config, scales, name, activations

    def store(self, layer, weight, random):
        outputs, inputs = weight.shape
        codes = random.integers(0, 256, (outputs, inputs), dtype=np.uint8)
        codes[(codes & 127) == 127] = 0
        shape, of = self.scales(outputs, inputs)
        scales = torch.from_numpy(random.uniform(1e-3, 2e-3, shape)).float()
        numbers, factors = E4M3[torch.from_numpy(codes).long()].numpy(), scales.numpy()
        expected = torch.tensor(
            [[float(numbers[o, i] * of(factors, o, i)) for i in range(inputs)] for o in range(outputs)]
        )
        stored = {f"{layer}.weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), f"{layer}.{self.name}": scales}
        stored |= {f"{layer}.{own}": torch.tensor(0.5) for own in self.activations}
        return stored, expected


def whole(outputs, inputs):
    return (1,), lambda scales, o, i: scales[0]


def rows(outputs, inputs):
    return (outputs, 1), lambda scales, o, i: scales[o, 0]


def blocks(outputs, inputs):
    return (math.ceil(outputs / 40), math.ceil(inputs / 40)), lambda scales, o, i: scales[o // 40, i // 40]


BLOCKED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [40, 40]}
FORMATS = {
    "gptq": Gptq(),
    "gptq, 8 bits, shuffled": Gptq(8, shuffled=True),
    "gptq, 2 bits, one group": Gptq(2, -1),
    "gptq v2": Gptq(form="gptq_v2"),
    "gptq, format unsaid": Gptq(form=None),
    "gptq, 3 bits": Gptq(3),
    "gptq v2, 3 bits, shuffled": Gptq(3, form="gptq_v2", shuffled=True),
    "gptq, bits of each weight": Varied(),
    "awq": Awq(),
    "awq, gemv": Gemv(),
    "awq, gemv_fast": Gemv(fast=True),
    "torchao, int8": TorchAo("Int8Tensor"),
    "torchao, fp8": TorchAo("Float8Tensor"),
    "torchao, int4": TorchAo("Int4Tensor"),
    "fp8 in blocks": Fp8(BLOCKED, blocks, "weight_scale_inv"),
    "fp8 whole, activations known": Fp8(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        whole,
        activations=("input_scale",),
    ),
    "compressed, tensor": Fp8(compressed("tensor"), whole, activations=("input_scale",)),
    "compressed, channel": Fp8(compressed("channel"), rows),
    "compressed, block": Fp8(compressed("block", block_structure=[40, 40]), blocks),
    "compressed, 4 bits": Integers(),
    "compressed, 4 bits with zeros, shuffled": Integers(apart=True, shuffled=True),
    "compressed, 8 bits": Integers(8, 16, form="int-quantized"),
    "compressed, 2 bits": Integers(2),
    "compressed, nvfp4": Floats("nvfp4-pack-quantized", 16),
    "compressed, mxfp4": Floats("mxfp4-pack-quantized"),
    "compressed, mxfp8": Floats("mxfp8-quantized", bits=8),
    "bitsandbytes, 4 bits": BitsAndBytes(),
    "bitsandbytes, 4 bits nested": BitsAndBytes(nested=True),
    "bitsandbytes, 8 bits": Int8(),
}


def folder_of(path, plain, form):
    """A folder in this format, and the plain weights that it stands for."""
    config, tensors = plain
    random = np.random.default_rng(1)
    stored, expected = {}, dict(tensors)
    for name, tensor in tensors.items():
        if is_linear(name):
            packed, expected[name] = form.store(name.removesuffix(".weight"), tensor, random)
            stored |= packed
        else:
            stored[name] = tensor
    write_folder(path, config | {"quantization_config": form.config}, stored)
    if isinstance(form, TorchAo):
        classes = {name: json.dumps({"_type": form.kind if is_linear(name) else "Tensor"}) for name in tensors}
        save_file(stored, path / "model.safetensors", metadata={"format": "pt", "tensor_names": "[]", **classes})
        (path / "manifest.json").unlink()
    return expected


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_quantised_folder_has_the_weights_and_logits_that_its_format_says(plain, form, tmp_path):
    expected = folder_of(tmp_path / "packed", plain, form)
    found = with_plain_weights(read_folder(tmp_path / "packed")).tensors
    assert set(found) == set(expected)
    for name, weight in expected.items():
        assert found.entries[name].shape == tuple(weight.shape), name
        assert torch.equal(found[name], weight), name
    kept = with_plain_weights(read_folder(tmp_path / "packed"), in_blocks=True).tensors
    for name, weight in expected.items():
        assert torch.equal(kept[name] * 1, weight), name
    write_folder(tmp_path / "plain", plain[0], expected)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        logits = load_model(tmp_path / "packed").model(tokens)
        torch.testing.assert_close(logits, load_model(tmp_path / "plain").model(tokens))
        again = load_model(convert(tmp_path / "packed", tmp_path / "converted", "float32"))
        torch.testing.assert_close(again.model(tokens), logits)


def test_experts_in_mxfp4_are_those_of_the_format_and_of_transformers(plain, tmp_path):
    random = np.random.default_rng(2)
    blocks = torch.from_numpy(random.integers(0, 256, (2, 3, 4, 16), dtype=np.uint8))
    scales = torch.from_numpy(random.integers(120, 134, (2, 3, 4), dtype=np.uint8))
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.empty(2, 128, 3)
    for e, o, i in np.ndindex(2, 3, 128):
        byte = int(blocks[e, o, i // 32, i % 32 // 2])
        code = byte >> 4 if i % 2 else byte & 15
        expected[e, i, o] = (-1 if code & 8 else 1) * levels[code & 7] * 2.0 ** (int(scales[e, o, i // 32]) - 127)
    stored = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales, "norm.weight": torch.ones(3)}
    write_folder(tmp_path / "model", {"quantization_config": {"quant_method": "mxfp4"}}, stored)
    found = with_plain_weights(read_folder(tmp_path / "model")).tensors
    assert set(found) == {"experts.down_proj", "norm.weight"}
    assert torch.equal(found["experts.down_proj"], expected)
    peer = pytest.importorskip("transformers.integrations.mxfp4")
    theirs = peer.convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert torch.equal(found["experts.down_proj"], theirs)


@pytest.mark.parametrize(
    ("form", "stays"),
    [
        (Gptq(), True),
        (Gptq(form="gptq_v2"), True),
        (Awq(), True),
        (Integers(), True),
        (Integers(apart=True), True),
        (Integers(shuffled=True), False),
        (Gptq(shuffled=True), False),
        (Gptq(bits=8), False),
        (Gptq(group_size=16), False),
        (Varied(), None),
    ],
)
def test_four_bits_in_whole_groups_stay_as_they_are_and_serve_the_same_numbers(plain, form, stays, tmp_path):
    # The other tensors in bfloat16, so that only the format says that these weights need more.
    plain = plain[0], {name: tensor if is_linear(name) else tensor.bfloat16() for name, tensor in plain[1].items()}
    expected = folder_of(tmp_path / "packed", plain, form)
    kept = with_plain_weights(read_folder(tmp_path / "packed"), in_blocks=True).tensors
    linear = [name for name in expected if is_linear(name)]
    assert {type(kept[name]) is BlockTensor for name in linear} == ({True, False} if stays is None else {stays})
    write_folder(tmp_path / "plain", plain[0], expected)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        served, exact = (load_model(tmp_path / name, quantization="auto").model(tokens) for name in ("packed", "plain"))
    torch.testing.assert_close(served, exact, rtol=1e-4, atol=1e-4)  # inputs of blocks keep sixteen bits


CHANGES = [
    (Gptq(), {"bits": 5}, "bits"),
    (Gptq(), {"bits": "4"}, "bits"),
    (Gptq(), {"group_size": 0}, "group_size"),
    (Gptq(), {"checkpoint_format": "marlin"}, "checkpoint_format"),
    (Gptq(), {"is_marlin_format": True}, "is_marlin_format"),
    (Gptq(), {"rotation": "hadamard"}, "rotation"),
    (Awq(), {"version": "marlin"}, "version"),
    (TorchAo("NVFP4Tensor"), {}, "quant_type.*NVFP4Tensor"),
    (Awq(), {"bits": 8}, "bits"),
    (FORMATS["fp8 in blocks"], {"fmt": "e5m2"}, "fmt"),
    (FORMATS["fp8 in blocks"], {"weight_block_size": [40]}, "weight_block_size"),
    (FORMATS["fp8 in blocks"], {"quant_method": "quanto"}, "quant_method.*quanto.*gptq"),
    (FORMATS["fp8 in blocks"], {"quant_method": None}, "quant_method"),
    (FORMATS["compressed, tensor"], {"format": "marlin-24"}, "format"),
    (Integers(), Integers(bits=3, size=64).config, "config_groups.*3 bits"),
    (BitsAndBytes(), {"bnb_4bit_blocks": 3}, "bnb_4bit_blocks"),
    (FORMATS["compressed, tensor"], {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    (FORMATS["compressed, tensor"], {"config_groups": {}}, "config_groups"),
    (FORMATS["compressed, tensor"], compressed("group"), r"config_groups\.group_0\.weights\.strategy"),
    (FORMATS["compressed, tensor"], compressed("tensor", type="int"), r".*weights\.type"),
    (FORMATS["compressed, tensor"], compressed("tensor", num_bits=4), r".*weights\.num_bits"),
]


@pytest.mark.parametrize(
    ("form", "change", "named"), CHANGES, ids=[f"{named} {i}" for i, (*_, named) in enumerate(CHANGES)]
)
def test_what_is_not_computed_is_refused_by_name(plain, form, change, named, tmp_path):
    folder_of(tmp_path / "packed", plain, form)
    (tmp_path / "packed" / "manifest.json").unlink(missing_ok=True)
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": form.config | change}))
    for read in (load_model, lambda folder: convert(folder, tmp_path / "converted")):
        with pytest.raises(Incompatible, match=f"quantization_config.{named}"):
            read(tmp_path / "packed")


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("form", "damage", "said"),
    [
        (Gptq(), lambda t: t.pop(f"{LAYER}.scales"), rf"{LAYER}\.scales.*is missing"),
        (Gptq(), lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"][:1]}), "scales has shape"),
        (Gptq(), lambda t: t[f"{LAYER}.g_idx"].fill_(7), "g_idx refers to a group"),
        (Gptq(), lambda t: t[f"{LAYER}.g_idx"].fill_(-1), "g_idx refers to a group"),
        (Gptq(), lambda t: t.update({f"{LAYER}.weight": torch.ones(128, 64)}), "plain and quantised"),
        (Gptq(), lambda t: t[f"{LAYER}.scales"].fill_(torch.inf), "NaN or infinity"),
        (Awq(), lambda t: t.update({f"{LAYER}.qzeros": t[f"{LAYER}.qzeros"][:, :1]}), "qzeros has shape"),
        (FORMATS["fp8 in blocks"], lambda t: t.pop(f"{LAYER}.weight_scale_inv"), "has no weight_scale_inv"),
        (
            FORMATS["fp8 in blocks"],
            lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.ones(1, 1)}),
            "each block of",
        ),
        (Integers(), lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale.*is missing"),
        (Integers(), lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(7, 2)}), "scales of shape"),
        (Integers(shuffled=True), lambda t: t[f"{LAYER}.weight_g_idx"].fill_(9), "refers to a group"),
        (BitsAndBytes(), lambda t: t.pop(f"{LAYER}.weight.absmax"), "absmax.*is missing"),
        (BitsAndBytes(), lambda t: t.update({f"{LAYER}.weight": torch.ones(9, 1, dtype=torch.uint8)}), "does not fit"),
        (BitsAndBytes(), lambda t: t[f"{LAYER}.weight.quant_state.bitsandbytes__nf4"].fill_(1), "not the JSON"),
        (Gemv(), lambda t: t.update({f"{LAYER}.scales": torch.ones(128, 1)}), "do not fit groups of 32"),
        (Varied(), lambda t: t.update({f"{LAYER}.g_idx": torch.zeros(7, dtype=torch.int32)}), "bits"),
        (Int8(), lambda t: t.update({f"{LAYER}.SCB": torch.ones(3)}), "a scale for each output"),
        (Int8(), lambda t: t[f"{LAYER}.weight_format"].fill_(1), "only rows"),
        (FORMATS["compressed, channel"], lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(7, 1)}), "one scale"),
    ],
)
def test_tensors_that_are_not_those_of_the_format_are_refused_by_name(plain, form, damage, said, tmp_path):
    folder_of(tmp_path / "packed", plain, form)
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    damage(tensors)
    (tmp_path / "packed" / "manifest.json").unlink(missing_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "packed" / "model.safetensors"
    )
    with pytest.raises(CheckpointInvalid, match=said):
        load_model(tmp_path / "packed")


def test_a_folder_that_says_it_is_quantised_and_is_not_is_refused(plain, tmp_path):
    config, tensors = plain
    write_folder(tmp_path / "model", config | {"quantization_config": BLOCKED}, tensors)
    with pytest.raises(CheckpointInvalid, match="quantization_config: names Fp8, but no tensor is stored in"):
        load_model(tmp_path / "model")


@pytest.mark.oracle
def test_gpt_oss_with_experts_in_mxfp4_gives_the_logits_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    own = {"max_position_embeddings": 64, "sliding_window": 5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    peer = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads, **ends, **own, **rope)).eval()
    random, stored, levels = np.random.default_rng(3), {}, torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    with torch.no_grad():
        for name, weight in peer.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, inputs, outputs = weight.shape
                codes = torch.from_numpy(random.integers(0, 16, (experts, outputs, inputs)))
                scales = torch.from_numpy(random.integers(122, 126, (experts, outputs, inputs // 32)))
                values = levels[codes & 7] * (1 - 2 * (codes >> 3)) * 2.0 ** (scales - 127).repeat_interleave(32, -1)
                weight.copy_(values.transpose(1, 2))
                pairs = codes.view(experts, outputs, inputs // 32, 16, 2)
                stored[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
                stored[f"{name}_scales"] = scales.to(torch.uint8)
            else:
                weight.normal_(mean=float("norm" in name), std=0.2)
                stored[name] = weight.detach().clone()
    config = json.loads(peer.config.to_json_string(use_diff=False)) | {"quantization_config": {"quant_method": "mxfp4"}}
    write_folder(tmp_path / "model", config, stored)
    tokens = torch.randint(61, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "model").model(tokens), peer(tokens).logits, rtol=0, atol=1e-4)


# As `to_dict` of transformers 5.24's classes and GPTQModel 7.7, besides the keys that the forms above have.
WRITTEN = {
    "gptq": {
        "method": "gptq",
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
        "damp_percent": 0.1,
        "act_group_aware": True,
        "model_seqlen": None,
        "format": "gptq",
        "backend": "auto",
    },
    "awq": {
        "checkpoint_format": "gemm",
        "pack_dtype": "int32",
        "desc_act": False,
        "act_group_aware": True,
        "sym": True,
        "format": "gemm",
        "true_sequential": True,
    },
    "fp8": {"modules_to_convert": None, "scale_fmt": "float", "expert_dtype": "fp8", "dequantize": False},
    "compressed-tensors": {"config_groups": None, "moe_sparsity_config": None, "run_compressed": True},
}


@pytest.mark.parametrize("method", WRITTEN)
def test_keys_that_are_not_about_the_numbers_stop_no_file(method):
    usual = {
        "gptq": {"bits": 4},
        "awq": {"bits": 4, "zero_point": True},
        "compressed-tensors": {"format": "float-quantized"},
    }
    config = {"quant_method": method, **usual.get(method, {}), **WRITTEN[method]}
    assert format_of({"quantization_config": config}, Path("config.json")) is not None
