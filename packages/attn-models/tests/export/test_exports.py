"""What is exported is computed alike by other programs: transformers, and the reader of GGUF files."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core import Capability, installed
from attn_core.errors import Incompatible, InvalidValue
from attn_models.adapters.base import StateDictAdapter
from attn_models.adapters.registry import installed_adapters
from attn_models.export import export_model
from attn_models.loading import load_model, save_model
from attn_models.tokenizers.learned import byte_pair_tokenizer, character_tokenizer, word_tokenizer
from attn_models.weights.manifest import TRAINING, record_source
from attn_schema.decoder import DecoderConfig
from attn_testing.families import FAMILIES
from gguf import GGUFReader
from safetensors.torch import load_file

TEXT = "To be, or not to be: that is the question. naïve 日本\n"
ROTARY = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary"}
LEARNED = {"norm": "layer", "feed_forward": "gelu_tanh", "positions": "learned"}
GEMMA = {**ROTARY, "feed_forward": "geglu_tanh", "norm_place": "both", "scale_embedding": True, "norm_eps": 1e-6}
WINDOWED = {"mechanism": "gemma", "options": {"norm_eps": None, "cap": 50.0, "window": 8}}
CAPPED = {"mechanism": "gemma", "options": {"norm_eps": None, "cap": 50.0}}
MODELS = {
    "llama": ROTARY | {"mechanism": "gqa", "num_kv_heads": 2, "tie_word_embeddings": False},
    "mixtral": ROTARY | {"num_experts": 3, "num_experts_per_tok": 2},
    "qwen3": ROTARY | {"mechanism": "gemma", "options": {"norm_eps": 1e-5}, "num_kv_heads": 2},
    "gpt2": LEARNED | {"bias": True},
    "gpt2, biases of zero": LEARNED,
    "gpt_neox": ROTARY | {"norm": "layer", "feed_forward": "gelu_tanh", "partial_rotary_factor": 0.5},
    "gemma2": GEMMA | {"pattern": [WINDOWED, CAPPED], "final_logit_softcapping": 30.0},
}
SIZES = {"max_seq_len": 32, "hidden_size": 64, "num_layers": 2, "num_heads": 4}


def made(folder, fields, tokenizer):
    """A folder of a small model in the native layout, and the model."""
    torch.manual_seed(0)
    family = installed().models.get("decoder")
    model = family.build(family.configure({**SIZES, "vocab_size": tokenizer.vocab_size, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return save_model(folder, model, tokenizer), model


def logits_of(model, tokens):
    with torch.no_grad():
        return model(tokens)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_and_the_reader_of_gguf_compute_what_the_model_computes(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = character_tokenizer(TEXT)
    folder, model = made(tmp_path / "own", MODELS[name], tokenizer)
    layout = name.partition(",")[0]
    assert export_model(folder, tmp_path / "hf").layout == layout
    tokens = torch.tensor([tokenizer.encode(TEXT[:24])])
    ours = logits_of(model, tokens)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    torch.testing.assert_close(logits_of(theirs, tokens).logits, ours, atol=2e-5, rtol=0)
    with torch.no_grad():
        made_there = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False)
    greedy = tokens
    for _ in range(6):
        greedy = torch.cat([greedy, logits_of(model, greedy)[:, -1:].argmax(-1)], 1)
    assert made_there.tolist() == greedy.tolist()
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert read(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    if layout not in ("mixtral", "gpt_neox"):  # GGUF files of the one are not read, of the other not written
        export_model(folder, tmp_path / "x.gguf", "gguf", quantization="f32")
        again = load_model(tmp_path / "x.gguf")
        torch.testing.assert_close(logits_of(again.model, tokens), ours, atol=1e-6, rtol=0)
        assert again.tokenizer.encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize("quantization", ["f16", "q8_0", "q6_k", "q5_k", "q4_k"])
def test_quantized_matrices_differ_by_their_rounding_alone(quantization, tmp_path):
    tokenizer = byte_pair_tokenizer([TEXT], 280)
    folder, model = made(tmp_path / "own", MODELS["llama"] | {"hidden_size": 256}, tokenizer)
    done = export_model(folder, tmp_path / "x.gguf", "gguf", quantization=quantization)
    stored = {each.name: each.tensor_type.name.lower() for each in GGUFReader(tmp_path / "x.gguf").tensors}
    assert {(name.split(".")[-2], kind) for name, kind in stored.items() if kind != "f32"} == set(done.types.items())
    again = load_model(tmp_path / "x.gguf")
    assert again.tokenizer.encode(TEXT) == tokenizer.encode(TEXT)
    wide, exact = ({n: p.detach().float() for n, p in each.named_parameters()} for each in (again.model, model))
    bound = {"f16": 3e-4, "q8_0": 0.01, "q6_k": 0.02, "q5_k": 0.04, "q4_k": 0.08}[quantization]
    for name, weight in exact.items():
        error = (wide[name] - weight).norm() / weight.norm()
        assert error <= (bound if weight.ndim == 2 else 0), name


def test_tokens_that_a_vocabulary_lacks_are_none_in_the_export(tmp_path):
    folder, _ = made(tmp_path / "own", MODELS["llama"], character_tokenizer(TEXT))
    export_model(folder, tmp_path / "hf")
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {described[f"{name}_token_id"] for name in ("bos", "eos", "pad")} == {None}


def test_the_card_says_how_a_model_was_made(tmp_path):
    folder, _ = made(tmp_path / "own", MODELS["llama"], character_tokenizer(TEXT))
    record_source(folder, {TRAINING: {"dataset": "plays | poems", "steps": 20, "loss": 2.5}})
    export_model(folder, tmp_path / "hf")
    rows = (tmp_path / "hf" / "README.md").read_text().splitlines()
    assert {"| mechanism | gqa (2 layers) |", "| dataset | plays / poems |", "| loss | 2.5 |"} <= set(rows)
    assert load_model(tmp_path / "hf", verify="hashes").parameters == load_model(folder).parameters


SCANNED = ("linear", "gla", "deltanet", "performer", "path", "gated_deltanet", "rwkv7")
RECURRENT = {name: LEARNED | {"mechanism": name, "num_layers": 1} for name in SCANNED}


@pytest.mark.parametrize("name", ["llama", "gpt2", *RECURRENT])
def test_onnx_runtime_computes_sequences_of_any_length(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    if name in RECURRENT and not {name, f"attn-recurrent/{name}"} & set(installed().mechanisms.names()):
        pytest.skip("a mechanism of a plugin that is not installed")
    folder, model = made(tmp_path / "own", (MODELS | RECURRENT)[name], character_tokenizer(TEXT))
    export_model(folder, tmp_path / "onnx", "onnx")
    session = runtime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    for batch, length in ((1, 1), (2, 7), (3, 32)):
        tokens = torch.randint(0, model.vocab_size, (batch, length))
        (found,) = session.run(None, {"tokens": tokens.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), logits_of(model, tokens), atol=2e-5, rtol=0)


def test_an_exported_folder_is_read_back_and_exported_as_it_is(tmp_path):
    tokenizer = byte_pair_tokenizer([TEXT], 280)
    folder, model = made(tmp_path / "own", MODELS["gpt2, biases of zero"], tokenizer)
    export_model(folder, tmp_path / "hf")
    tokens = torch.tensor([tokenizer.encode(TEXT)[:20]])
    torch.testing.assert_close(logits_of(load_model(tmp_path / "hf").model, tokens), logits_of(model, tokens))
    export_model(tmp_path / "hf", tmp_path / "again")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_a_model_that_no_layout_expresses_is_refused_by_its_fields(tmp_path):
    tokenizer = character_tokenizer(TEXT)
    folder, _ = made(tmp_path / "own", {**ROTARY, "norm_place": "post", "norm": "layer"}, tokenizer)
    with pytest.raises(Incompatible, match="norm_place 'post'"):
        export_model(folder, tmp_path / "hf")
    sparse, _ = made(tmp_path / "sparse", {**ROTARY, "mechanism": "sparsemax"}, tokenizer)
    with pytest.raises(Incompatible, match="sparsemax"):
        export_model(sparse, tmp_path / "hf")
    linear, _ = made(tmp_path / "linear", {**LEARNED, "mechanism": "linear"}, tokenizer)
    with pytest.raises(Incompatible, match="mechanism 'linear' cannot be expressed in a gpt2"):
        export_model(linear, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_gguf_lacks_is_refused_by_name_and_nothing_is_left(tmp_path):
    windowed = MODELS["llama"] | {"mechanism": "sliding_window", "options": {"window": 8}}
    folder, _ = made(tmp_path / "own", windowed, character_tokenizer(TEXT))
    with pytest.raises(Incompatible, match="window"):
        export_model(folder, tmp_path / "x.gguf", "gguf")
    exact, _ = made(tmp_path / "exact", MODELS["gpt2"] | {"feed_forward": "gelu"}, character_tokenizer(TEXT))
    with pytest.raises(Incompatible, match="feed_forward"):
        export_model(exact, tmp_path / "x.gguf", "gguf")
    words, _ = made(tmp_path / "words", MODELS["llama"], word_tokenizer([TEXT]))
    with pytest.raises(Incompatible, match="WordLevel"):
        export_model(words, tmp_path / "x.gguf", "gguf")
    with pytest.raises(InvalidValue, match="q8_0"):
        export_model(words, tmp_path / "x.gguf", "gguf", quantization="q9")
    assert {path.name for path in tmp_path.iterdir()} == {"own", "exact", "words"}


@pytest.mark.parametrize("to", ["hf", "onnx", "safetensors"])
def test_a_quantization_that_a_format_does_not_have_is_refused(to, tmp_path):
    folder, _ = made(tmp_path / "own", MODELS["llama"], character_tokenizer(TEXT))
    with pytest.raises(InvalidValue, match="quantization"):
        export_model(folder, tmp_path / "out", to, quantization="q8_0")


def test_what_is_there_is_replaced_only_on_request_and_foreign_files_never(tmp_path):
    folder, _ = made(tmp_path / "own", MODELS["llama"], character_tokenizer(TEXT))
    for to, target in (("hf", tmp_path / "out"), ("safetensors", tmp_path / "out.safetensors")):
        export_model(folder, target, to)
        with pytest.raises(InvalidValue, match="target"):
            export_model(folder, target, to)
        export_model(folder, target, to, overwrite=True)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    for to in ("hf", "gguf"):
        with pytest.raises(InvalidValue, match="target"):
            export_model(folder, foreign, to, overwrite=True)
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
    assert load_file(tmp_path / "out.safetensors")["embedding.weight"].shape[1] == SIZES["hidden_size"]


@pytest.mark.parametrize("layout", sorted(installed_adapters(StateDictAdapter)))
def test_a_layout_describes_or_refuses_every_kind_of_mechanism(layout):
    adapter, family = installed_adapters(StateDictAdapter)[layout], installed().models.get("decoder")
    causal = {item.Config: item for item in installed().mechanisms if item.can(Capability.CAUSAL)}
    for mechanism in causal.values() if adapter.Config is DecoderConfig else ():
        config = family.configure({**SIZES, "vocab_size": 64, "mechanism": mechanism.name, "positions": "learned"})
        try:
            described = adapter.to_hf_config(config)
        except Incompatible:
            continue
        assert adapter.differences(adapter.from_hf_config(described), config) == []


def test_every_family_of_decoders_that_is_written_is_among_those_that_are_compared():
    assert {name.partition(",")[0] for name in MODELS} <= FAMILIES.keys()
