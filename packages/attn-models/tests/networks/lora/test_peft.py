"""Folders of adapters: PEFT's layout, read and written, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, WrongState
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.lora import AdaptedModel, AdapterConfig, LoraAdapter, merge_adapter, read_adapter, write_adapter
from attn_models.lora.files import modules_of, weights_sha256
from attn_schema.decoder import DecoderConfig
from safetensors.torch import load_file, save_file

TOKENS = torch.arange(20).reshape(2, 10) % 31
FORMS = ("llama", "gpt2", "attn_decoder")


@pytest.fixture(params=FORMS)
def base(request: pytest.FixtureRequest, tiny: Callable[..., DecoderConfig], tmp_path: Path) -> Path:
    torch.manual_seed(0)
    llama = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "bias": False, "mechanism": "gqa"}
    gpt2 = {"positions": "learned", "feed_forward": "gelu_tanh", "bias": True, "tie_word_embeddings": True}
    fields = {"llama": llama | {"num_kv_heads": 2}, "gpt2": gpt2, "attn_decoder": {"mechanism": "mla"}}
    return save_model(tmp_path / "base", Decoder(tiny(**fields[request.param])), layout=request.param)


def trained(base: Path, model: Decoder, **config: object) -> LoraAdapter:
    torch.manual_seed(1)
    said = AdapterConfig(r=2, lora_alpha=8, base_model="base", base_sha256=weights_sha256(base), **config)
    adapter = LoraAdapter.fresh(model, said, modules=modules_of(model, base))
    for name in adapter:
        torch.nn.init.normal_(adapter.of(name).b, std=0.3)
    return adapter.eval()


def outputs(model: Decoder, adapter: LoraAdapter) -> torch.Tensor:
    adapted = AdaptedModel(model)
    with torch.no_grad(), adapted.using([(adapter, TOKENS.numel())]):
        out = model(TOKENS)
    adapted.detach()
    return out


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"use_rslora": True}], ids=str)
def test_what_is_written_computes_the_same_when_it_is_read(base: Path, tmp_path: Path, kind: dict) -> None:
    model = load_model(base).model
    adapter = trained(base, model, **kind)
    folder = write_adapter(tmp_path / "adapter", adapter, model, base)
    again = read_adapter(folder, model, base)
    torch.testing.assert_close(outputs(model, again), outputs(model, adapter), rtol=1e-5, atol=1e-5)
    assert again.config.base_sha256 == weights_sha256(base)


def test_an_adapter_of_other_weights_is_refused(base: Path, tmp_path: Path) -> None:
    loaded = load_model(base)
    folder = write_adapter(tmp_path / "adapter", trained(base, loaded.model), loaded.model, base)
    torch.manual_seed(9)
    other = save_model(tmp_path / "other", Decoder(loaded.config))
    with pytest.raises(Incompatible, match="whose weights are not those of other"):
        read_adapter(folder, load_model(other).model, other)


def test_layers_of_another_shape_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    loaded = load_model(base)
    adapter = trained(base, loaded.model)
    object.__setattr__(adapter, "config", dataclasses.replace(adapter.config, base_sha256=""))
    folder = write_adapter(tmp_path / "adapter", adapter, loaded.model, base)
    wider = dataclasses.replace(loaded.config, hidden_size=32)
    model = Decoder(wider)
    with pytest.raises(Incompatible, match=r"outputs|inputs"):
        read_adapter(folder, model, base)
    fewer = Decoder(dataclasses.replace(loaded.config, num_layers=1))
    with pytest.raises(Incompatible, match="which the model does not have"):
        read_adapter(folder, fewer, base)


CHANGES = [
    ({"strange_field": 1}, "unknown field 'strange_field'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save: lm_head is missing"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA'"),
    ({"trainable_token_indices": [1]}, "trainable_tokens_delta is missing"),
    ({"trainable_token_indices": ["a"]}, "trainable_token_indices is"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"r": 3}, "not of rank 3"),
    ({"r": 0}, "r is 0"),
    ({"lora_alpha": None}, "lora_alpha is missing"),
    ({"rank_pattern": {"(": 2}}, "is not a regular expression"),
    ({"use_dora": True}, "lora_magnitude_vector' is missing"),
    ({"lora_bias": True}, "lora_bias is True"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=lambda value: str(value)[:30])
def test_what_would_be_computed_otherwise_is_refused_by_name(
    change: dict, said: str, tiny: Callable[..., DecoderConfig], tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", Decoder(tiny()))
    model = load_model(base).model
    folder = write_adapter(tmp_path / "adapter", trained(base, model), model, base)
    (folder / "manifest.json").unlink()
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointInvalid, match=said.replace("(", r"\(")):
        read_adapter(folder, model, base)


def test_a_damaged_or_incomplete_adapter_is_refused(tiny: Callable[..., DecoderConfig], tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", Decoder(tiny()))
    model = load_model(base).model
    folder = write_adapter(tmp_path / "adapter", trained(base, model), model, base)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointInvalid, match="SHA-256"):
        read_adapter(folder, model, base)
    weights.write_bytes(whole)
    (folder / "manifest.json").unlink()
    tensors = load_file(weights)
    first = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, weights)
    with pytest.raises(CheckpointInvalid, match="is missing"):
        read_adapter(folder, model, base)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, weights)
    with pytest.raises(CheckpointInvalid, match="does not belong to a LoRA"):
        read_adapter(folder, model, base)


def test_targets_are_named_by_either_name_and_unknown_ones_are_refused(
    tiny: Callable[..., DecoderConfig], tmp_path: Path
) -> None:
    fields = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "bias": False}
    base = save_model(tmp_path / "base", Decoder(tiny(**fields)), layout="llama")
    model = load_model(base).model
    config, modules = AdapterConfig(r=2, lora_alpha=2), modules_of(model, base)
    few = LoraAdapter.fresh(model, config, modules=modules, targets=("q_proj", "feed_forward.down"))
    assert {name.rpartition(".")[2] for name in few} == {"query", "down"}
    with pytest.raises(InvalidValue, match=r"c_attn.*q_proj"):
        LoraAdapter.fresh(model, config, modules=modules, targets=("c_attn",))


TABLES = [
    {"trainable_token_indices": (3, 5, 60)},
    {"modules_to_save": ("embed_tokens",)},
    {"modules_to_save": ("embed_tokens", "lm_head")},
    {"targets": ("q_proj", "embed_tokens"), "rank_pattern": {"embed_tokens": 3}},
    {"targets": ("q_proj", "lm_head"), "alpha_pattern": {"lm_head": 3.0}},
]


def of_tables(base: Path, model: Decoder, targets: tuple[str, ...] = ("q_proj",), **fields: object) -> LoraAdapter:
    torch.manual_seed(2)
    config = AdapterConfig(r=2, lora_alpha=8, **fields)
    adapter = LoraAdapter.fresh(model, config, modules=modules_of(model, base), targets=targets)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return adapter.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fields", TABLES, ids=str)
def test_changed_tables_begin_as_they_are_are_written_read_and_merged(
    tied: bool, fields: dict, tiny: Callable[..., DecoderConfig], tmp_path: Path
) -> None:
    form = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "bias": False, "tie_word_embeddings": tied}
    base = save_model(tmp_path / "base", Decoder(tiny(**form)), layout="llama")
    model = load_model(base).model
    fields = fields | ({"trainable_token_indices": (3, 5)} if "trainable_token_indices" in fields else {})
    adapter = of_tables(base, model, **fields)
    fresh = LoraAdapter.fresh(model, adapter.config, modules=modules_of(model, base), targets=fields.get("targets", ()))
    assert torch.equal(outputs(model, fresh.eval()), model(TOKENS)), "nothing is changed yet"
    changed = outputs(model, adapter)
    plain = {name: layer for name in adapter if (layer := adapter.of(name)) is not None}
    assert (outputs(model, LoraAdapter(adapter.config, plain).eval()) - changed).abs().max() > 1e-3
    adapted = AdaptedModel(model)
    adapted.always(adapter)
    target = TOKENS.roll(-1, 1)
    whole = torch.nn.functional.cross_entropy(changed.flatten(0, 1), target.flatten())
    torch.testing.assert_close(model.next_token_loss(TOKENS, target), whole, rtol=1e-5, atol=1e-5)
    model.next_token_loss(TOKENS, target).backward()
    assert all(parameter.grad is not None for parameter in adapter.parameters())
    adapted.detach()
    again = read_adapter(write_adapter(tmp_path / "adapter", adapter, model, base), model, base)
    torch.testing.assert_close(outputs(model, again), changed, rtol=1e-5, atol=1e-5)
    merge_adapter(model, again)
    torch.testing.assert_close(model(TOKENS), changed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(load_model(save_model(tmp_path / "m", model, layout="llama")).model(TOKENS), changed)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"modules_to_save": ("norm",)}, "modules_to_save"),
        ({"trainable_token_indices": (64,)}, "trainable_token_indices"),
        ({"trainable_token_indices": (1,), "modules_to_save": ("embed_tokens",)}, "changed in 2 ways"),
        ({"targets": ("embed_tokens",), "use_dora": True}, "use_dora"),
        ({"rank_pattern": {"k_proj": 3}}, "rank_pattern"),
    ],
    ids=str,
)
def test_tables_and_patterns_that_cannot_be_are_refused(
    fields: dict, said: str, tiny: Callable[..., DecoderConfig], tmp_path: Path
) -> None:
    form = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "bias": False}
    base = save_model(tmp_path / "base", Decoder(tiny(**form)), layout="llama")
    with pytest.raises(InvalidValue, match=said):
        of_tables(base, load_model(base).model, **fields)


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fields", TABLES, ids=str)
def test_changed_tables_are_those_of_peft(tied: bool, fields: dict, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    of_transformers("llama", tie_word_embeddings=tied).eval().save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base").model
    ours = of_tables(tmp_path / "base", model, **fields)
    write_adapter(tmp_path / "ours", ours, model, tmp_path / "base")
    theirs = of_transformers("llama", tie_word_embeddings=tied).eval()
    read = peft.PeftModel.from_pretrained(theirs, tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(read(TOKENS).logits, outputs(model, ours), rtol=1e-4, atol=1e-4)
    read.save_pretrained(tmp_path / "theirs")
    again = read_adapter(tmp_path / "theirs", model, tmp_path / "base")
    torch.testing.assert_close(outputs(model, again), outputs(model, ours), rtol=1e-4, atol=1e-4)


@pytest.mark.oracle
def test_an_untied_change_of_a_tied_table_is_computed_and_not_merged(tmp_path: Path) -> None:
    """As PEFT does without `ensure_weight_tying`."""
    peft = pytest.importorskip("peft")
    theirs = of_transformers("llama", tie_word_embeddings=True).eval()
    theirs.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(theirs, config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    wrapped.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "base").model
    adapter = read_adapter(tmp_path / "theirs", model, tmp_path / "base")
    with torch.no_grad():
        torch.testing.assert_close(outputs(model, adapter), wrapped(TOKENS).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(WrongState, match="tied"):
        merge_adapter(model, adapter)


def of_transformers(kind: str, **fields: object) -> object:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 61, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    llama = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(**small, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        return transformers.GPT2LMHeadModel(config)
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small, **llama, head_dim=12))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **llama, **fields))


OPTIONS = [
    {},
    {"use_dora": True},
    {"use_rslora": True, "lora_alpha": 3},
    {"rank_pattern": {"layers.1.self_attn.q_proj": 7}, "alpha_pattern": {"k_proj": 5}},
]


@pytest.mark.oracle
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_adapters_of_peft_give_peft_its_logits_and_ours_give_peft_ours(
    kind: str, options: dict, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    theirs = of_transformers(kind).eval()
    theirs.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        **({"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": "all-linear"} | options)
    )
    wrapped = peft.get_peft_model(theirs, config).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
        if "magnitude" in name:
            parameter.data *= 1.3
    wrapped.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "base").model
    adapter = read_adapter(tmp_path / "theirs", model, tmp_path / "base")
    with torch.no_grad():
        expected = wrapped(TOKENS).logits
    got = outputs(model, adapter)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    ours = trained(tmp_path / "base", model, use_dora=bool(options.get("use_dora")))
    write_adapter(tmp_path / "ours", ours, model, tmp_path / "base")
    read = peft.PeftModel.from_pretrained(of_transformers(kind).eval(), tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(read(TOKENS).logits, outputs(model, ours), rtol=1e-4, atol=1e-4)
