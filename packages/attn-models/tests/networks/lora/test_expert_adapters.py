"""Adapters of experts in PEFT's files: which rows of A and columns of B are whose, and which names hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.lora import AdaptedModel, AdapterConfig, LoraAdapter, merge_adapter, read_adapter, write_adapter
from attn_models.lora.experts import stack, unstack
from attn_models.lora.files import modules_of
from attn_models.lora.sites import StoredModule
from attn_schema.decoder import DecoderConfig
from safetensors.torch import load_file, save_file

TOKENS = torch.arange(20).reshape(2, 10) % 31
EXPERTS = 4
MLP = "base_model.model.model.layers.1.mlp"


@pytest.fixture
def base(tiny: Callable[..., DecoderConfig], tmp_path: Path) -> Path:
    fields = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "bias": False, "mechanism": "gqa"}
    experts = {"num_kv_heads": 2, "num_experts": EXPERTS, "num_experts_per_tok": 2, "routing": "mixtral"}
    torch.manual_seed(0)
    return save_model(tmp_path / "base", Decoder(tiny(**fields, **experts)), layout="mixtral")


def random_adapter(model: Decoder, base: Path, targets: tuple[str, ...] = (), **config: object) -> LoraAdapter:
    torch.manual_seed(1)
    said = AdapterConfig(r=2, lora_alpha=8, **config)
    adapter = LoraAdapter.fresh(model, said, modules=modules_of(model, base), targets=targets)
    for name in adapter:
        torch.nn.init.normal_(adapter.of(name).b, std=0.3)
    return adapter.eval()


def outputs(model: Decoder, adapter: LoraAdapter) -> torch.Tensor:
    adapted = AdaptedModel(model)
    with torch.no_grad(), adapted.using([(adapter, TOKENS.numel())]):
        out = model(TOKENS)
    adapted.detach()
    return out


def merged(base: Path, adapter: LoraAdapter) -> torch.Tensor:
    model = load_model(base).model
    merge_adapter(model, adapter)
    with torch.no_grad():
        return model(TOKENS)


def test_blocks_of_a_and_strides_of_b_belong_to_the_experts_in_order(base: Path, tmp_path: Path) -> None:
    model = load_model(base).model
    adapter = random_adapter(model, base)
    folder = write_adapter(tmp_path / "adapter", adapter, model, base)
    tensors, config = (
        load_file(folder / "adapter_model.safetensors"),
        json.loads((folder / "adapter_config.json").read_text()),
    )
    assert {"model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"} < set(
        config["target_parameters"]
    )
    assert sorted(config["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    hidden, width = model.config.hidden_size, model.config.expert_width
    first = "blocks.1.feed_forward.experts"
    # The stacked gates and up projections have a rank for each, and are inside of the down projections.
    for place, matrices, rank, sizes in (
        ("experts.base_layer", ("gate", "up"), 4, (hidden, 2 * width)),
        ("experts", ("down",), 2, (width, hidden)),
    ):
        a, b = tensors[f"{MLP}.{place}.lora_A.weight"], tensors[f"{MLP}.{place}.lora_B.weight"]
        assert (a.shape, b.shape) == ((EXPERTS * rank, sizes[0]), (sizes[1], rank * EXPERTS))
        for n in range(EXPERTS):
            own = torch.cat([adapter.of(f"{first}.{n}.{one}").delta() for one in matrices])
            torch.testing.assert_close(4 * b[:, n::EXPERTS] @ a[n * rank : (n + 1) * rank], own)
    again = read_adapter(folder, model, base)
    torch.testing.assert_close(outputs(model, again), outputs(model, adapter), rtol=1e-5, atol=1e-5)


def test_a_stack_whose_inputs_are_taken_for_outputs_has_its_factors_exchanged() -> None:
    module = StoredModule("experts.down_proj", ("x",) * 3, (5,), experts=3, swapped=True)
    factors = [(torch.randn(rank, 7), torch.randn(5, rank)) for rank in (2, 1, 2)]
    a, b = stack(module, factors)
    assert (a.shape, b.shape) == ((6, 5), (7, 6))
    stored = torch.einsum("ore,eri->eoi", b.reshape(7, 2, 3), a.reshape(3, 2, 5))
    for (down, up), (own_down, own_up), weight in zip(unstack(module, a, b), factors, stored, strict=True):
        torch.testing.assert_close(weight.mT, own_up @ own_down)
        torch.testing.assert_close(up @ down, own_up @ own_down)


def test_experts_by_name_as_before_transformers_5_are_read(base: Path, tmp_path: Path) -> None:
    model = load_model(base).model
    adapter, names = random_adapter(model, base, ("w1", "w2")), modules_of(model, base)
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    layers = {f"base_model.model.{names[name][0]}.lora_": adapter.of(name) for name in adapter}
    tensors = {f"{name}A.weight": layer.a.detach() for name, layer in layers.items()}
    tensors |= {f"{name}B.weight": layer.b.detach() for name, layer in layers.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    torch.testing.assert_close(outputs(model, read_adapter(folder, model, base)), outputs(model, adapter))


def test_experts_are_chosen_and_given_ranks_by_the_parameters_that_peft_has(base: Path, tmp_path: Path) -> None:
    model = load_model(base).model
    pattern = {"layers.1.mlp.experts.down_proj": 3}
    adapter = random_adapter(model, base, ("experts.down_proj",), rank_pattern=pattern)
    ranks = {name: len(adapter.of(name).a) for name in adapter}
    assert ranks == {f"blocks.{n}.feed_forward.experts.{e}.down": 2 + n for n in range(2) for e in range(EXPERTS)}
    folder = write_adapter(tmp_path / "adapter", adapter, model, base)
    torch.testing.assert_close(outputs(model, read_adapter(folder, model, base)), outputs(model, adapter))


def test_each_layer_nests_only_what_is_adapted_in_it(base: Path, tmp_path: Path) -> None:
    model = load_model(base).model
    targets = ("blocks.0.feed_forward.experts.3.down", "blocks.1.feed_forward.experts.0.up")
    adapter = random_adapter(model, base, targets)
    folder = write_adapter(tmp_path / "adapter", adapter, model, base)
    stored = {name.removesuffix(".weight") for name in load_file(folder / "adapter_model.safetensors")}
    layers = [MLP.replace("layers.1", f"layers.{n}") for n in range(2)]
    assert stored == {f"{mlp}.experts.lora_{matrix}" for mlp in layers for matrix in "AB"}
    parameters = json.loads((folder / "adapter_config.json").read_text())["target_parameters"]
    assert parameters == ["model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"]
    torch.testing.assert_close(outputs(model, read_adapter(folder, model, base)), outputs(model, adapter))


def test_what_peft_cannot_say_of_experts_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    model = load_model(base).model
    with pytest.raises(InvalidValue, match=r"use_dora.*experts"):
        write_adapter(tmp_path / "dora", random_adapter(model, base, use_dora=True), model, base)
    folder = write_adapter(tmp_path / "adapter", random_adapter(model, base), model, base)
    (folder / "manifest.json").unlink()
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text())
    for change, error in (
        ({"target_parameters": ["mlp.experts.down_proj"]}, Incompatible),
        ({"target_parameters": 1}, CheckpointInvalid),
        ({"use_dora": True}, CheckpointInvalid),
        ({"rank_pattern": {}}, CheckpointInvalid),
    ):
        path.write_text(json.dumps(values | change))
        with pytest.raises(error, match=r"experts|target_parameters"):
            read_adapter(folder, model, base)


def of_transformers(kind: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    fields = {
        "vocab_size": 61, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "num_experts_per_tok": 2,
    }  # fmt: skip
    mla = {
        "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "num_key_value_heads": 4,
    }  # fmt: skip
    names = {"deepseek_v2": "DeepseekV2", "gpt_oss": "GptOss", "mixtral": "Mixtral"}
    own = mla if kind == "deepseek_v2" else {"head_dim": 8, "num_local_experts": EXPERTS}
    torch.manual_seed(0)
    if kind == "llama4":
        own |= {"intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "attention_chunk_size": 32}
        config = transformers.Llama4TextConfig(**fields | own | {"num_experts_per_tok": 1})
        model = transformers.Llama4ForCausalLM(config)
    else:
        config = getattr(transformers, f"{names[kind]}Config")(**fields | own)
        model = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["deepseek_v2", "gpt_oss", "llama4", "mixtral"])
def test_adapters_of_experts_compute_the_same_in_peft(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    of_transformers(kind).save_pretrained(base)
    model = load_model(base).model
    ours = random_adapter(model, base)
    folder = write_adapter(tmp_path / "ours", ours, model, base)
    read = peft.PeftModel.from_pretrained(of_transformers(kind), folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(read(TOKENS).logits, outputs(model, ours), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(read.merge_and_unload()(TOKENS).logits, merged(base, ours), rtol=1e-4, atol=1e-4)

    for targets in (["experts.gate_up_proj", "experts.down_proj"], ["down_proj"]):
        config = peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=["o_proj"], target_parameters=targets, rank_pattern={"down_proj": 4}
        )
        wrapped = peft.get_peft_model(of_transformers(kind), config).eval()
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        wrapped.save_pretrained(tmp_path / "theirs")
        adapter = read_adapter(tmp_path / "theirs", model, base)
        with torch.no_grad():
            expected = wrapped(TOKENS).logits
        torch.testing.assert_close(outputs(model, adapter), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(merged(base, adapter), expected, rtol=1e-4, atol=1e-4)
