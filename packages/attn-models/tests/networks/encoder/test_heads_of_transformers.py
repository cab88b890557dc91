"""Encoders of many families as transformers writes them, with each of their heads: the same numbers, both ways."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible
from attn_models.adapters.registry import encoder_adapter
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import FirstTokenClassifier, Tagger
from attn_models.encoder.modernbert import ModernBertClassifier
from attn_models.loading.encoders import build_encoder, is_text_classifier, load_classifier, load_masked, save_encoder
from attn_models.tokenizers import character_tokenizer
from attn_models.weights import read_folder
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
DEBERTA = {
    "model_type": "deberta-v2",
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
"""As microsoft/deberta-v3-base, with fewer buckets, so that some hold several distances."""
FAMILIES = {
    "bert": SIZES,
    "roberta": SIZES,
    "xlm-roberta": SIZES,
    "camembert": SIZES,
    "distilbert": {"vocab_size": 31, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "electra": SIZES | {"embedding_size": 16},
    "albert": SIZES | {"embedding_size": 16, "num_hidden_groups": 2, "inner_group_num": 2},
    "mpnet": SIZES,
    "nomic_bert": SIZES,
    "gte": SIZES,
    "jina_embeddings_v3": SIZES,
    "deberta-v2": SIZES | DEBERTA,
    "deberta v2-xlarge": SIZES | DEBERTA | {"conv_kernel_size": 3, "conv_act": "gelu", "attention_head_size": 8},
    "deberta separate": SIZES
    | DEBERTA
    | {"share_att_key": False, "pos_att_type": "c2p", "norm_rel_ebd": "none", "position_buckets": -1}
    | {"position_biased_input": True, "type_vocab_size": 2, "conv_kernel_size": 5, "conv_groups": 2},
    "modernbert": SIZES | SPECIAL | {"pad_token_id": 0, "local_attention": 8},
}
TOKENS = torch.randint(2, 31, (3, 24), generator=torch.Generator().manual_seed(1))
KEEP = torch.arange(24) < torch.tensor([[24], [13], [2]])
TOKENIZER = character_tokenizer("abcdefgh ")


class ExactRotary(torch.nn.Module):
    """Rotary angles in float64: transformers computes them in float32 whatever the model's type."""

    def __init__(self, config):
        super().__init__()
        size, given = config.hidden_size // config.num_attention_heads, config.rope_parameters
        steps = torch.arange(0, size, 2, dtype=torch.float64) / size
        kinds = given if "full_attention" in given else {None: given}
        self.frequencies = {kind: rope["rope_theta"] ** -steps for kind, rope in kinds.items()}

    def forward(self, hidden, position_ids, layer_type=None):
        angles = (position_ids[..., None].double() * self.frequencies[layer_type]).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def kernel(family):
    """The eager one; ModernBERT's gives padding in whose windows is no real token NaN in float64, and then all."""
    return "sdpa" if family == "modernbert" else "eager"


def exact(peer):
    """The model in float64 throughout."""
    for module in list(peer.modules()):
        if hasattr(module, "rotary_emb"):
            module.rotary_emb = ExactRotary(peer.config)
    return peer.double().eval()


def drawn(family, head="", **fields):
    """A model of transformers in float64 in which every weight counts."""
    torch.manual_seed(0)
    sizes = {"model_type": family, **FAMILIES[family], **fields}
    config = transformers.AutoConfig.for_model(**sizes)
    peer = getattr(transformers, f"AutoModel{head}").from_config(config, attn_implementation=kernel(family))
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=float("norm" in name.lower() and "weight" in name), std=0.2)
    return peer.double().eval()


def written(peer, folder):
    """The folder that transformers writes, with a tokenizer."""
    peer.save_pretrained(folder)
    for name, content in TOKENIZER.files().items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(data)
    return folder


def padded(peer, *, first):
    """Tokens and their mask, with padding first or last."""
    tokens = torch.where(KEEP, TOKENS, peer.config.pad_token_id)
    return (tokens.flip(1), KEEP.flip(1)) if first else (tokens, KEEP)


@pytest.mark.parametrize("first", [False, True], ids=["padding last", "padding first"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows_are_those_of_transformers_both_ways(family, first, tmp_path):
    peer = drawn(family)
    ours = build_encoder(read_folder(written(peer, tmp_path / "theirs")), torch.float64).eval()
    save_encoder(tmp_path / "ours", ours, layout=peer.config.model_type)
    back = type(peer).from_pretrained(tmp_path / "ours", attn_implementation=kernel(family), dtype=torch.float64)
    tokens, keep = padded(peer, first=first)
    for their in map(exact, (peer, back)):
        theirs = their(tokens, attention_mask=keep.long()).last_hidden_state
        # Theirs turns a ModernBERT's queries, and takes the root of a DeBERTa's scale, in float32.
        tolerance = 1e-5 if family == "modernbert" else 1e-6 if "deberta" in family else 1e-10
        torch.testing.assert_close(ours(tokens, keep)[keep], theirs[keep], rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_guesses_are_those_of_transformers(family, tmp_path):
    peer = drawn(family, "ForMaskedLM")
    folder = written(peer, tmp_path)
    ours = load_masked(folder)[0]
    tokens, keep = padded(peer, first=False)
    theirs = exact(peer)(tokens, attention_mask=keep.long()).logits
    # Read in float32, so that the weights are rounded.
    torch.testing.assert_close(ours(tokens, keep)[keep].double(), theirs[keep], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_classes_are_those_of_transformers(family, head, tmp_path):
    peer = drawn(family, head, num_labels=3)
    folder = written(peer, tmp_path)
    ours, labels, _ = load_classifier(folder)
    assert labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    texts = head == "ForSequenceClassification"
    assert is_text_classifier(folder) is texts
    if family == "modernbert":
        assert isinstance(ours, ModernBertClassifier)
    else:
        assert isinstance(ours, FirstTokenClassifier if texts else Tagger)
    tokens, keep = padded(peer, first=False)
    theirs = exact(peer)(tokens, attention_mask=keep.long()).logits
    mine = ours(tokens, keep)
    mine, theirs = (mine[:, 0], theirs) if texts else (mine[keep], theirs[keep])
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_a_bias_that_a_layout_has_not_is_not_dropped(tmp_path):
    model = build_encoder(read_folder(written(drawn("gte"), tmp_path / "theirs")), torch.float64)
    with torch.no_grad():
        model.blocks[0].feed_forward.up.bias[3] = 1
    with pytest.raises(Incompatible, match=r"feed_forward\.up\.bias"):
        save_encoder(tmp_path / "ours", model, layout="gte")


@pytest.mark.parametrize("family", ["longformer", "big_bird"])
def test_classifiers_that_are_computed_otherwise_are_refused(family, tmp_path):
    sizes = SIZES | {"attention_window": 4, "attention_type": "original_full"}
    config = transformers.AutoConfig.for_model(family, **sizes)
    peer = transformers.AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(CheckpointInvalid, match=f"model_type: '{family}'"):
        load_classifier(written(peer, tmp_path))


def test_an_unembedding_of_its_own_is_refused(tmp_path):
    folder = written(drawn("bert", "ForMaskedLM"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    own = tensors["bert.embeddings.word_embeddings.weight"] + 1
    save_file(tensors | {"cls.predictions.decoder.weight": own}, folder / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"cls\.predictions\.decoder\.weight"):
        load_masked(folder)


CONFIG = EncoderConfig(vocab_size=31, max_seq_len=40, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48)


@pytest.mark.parametrize(
    "fields",
    [
        {"embedding_size": 16},
        {"repeats": (0, 0)},
        {"positions": "rotary"},
        {"positions": "none"},
        {"feed_forward": "swiglu"},
        {"attention_bias": False},
        {"mechanism": "t5_bias"},
        {"shared_biases": True, "mechanism": "t5_bias"},
    ],
    ids=str,
)
def test_what_other_layouts_have_not_is_not_written_in_them(fields, tmp_path):
    for layout, types in (("bert", 2), ("distilbert", 0)):
        own = encoder_adapter("attn_encoder").build(dataclasses.replace(CONFIG, type_vocab_size=types, **fields))
        with pytest.raises(Incompatible, match=next(iter(fields))):
            save_encoder(tmp_path / layout, own, layout=layout)
    model = encoder_adapter("attn_encoder").build(dataclasses.replace(CONFIG, **fields))
    again = build_encoder(read_folder(save_encoder(tmp_path / "own", model)), torch.float32)
    torch.testing.assert_close(again(TOKENS), model(TOKENS))
