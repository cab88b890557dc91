"""Whatever a decoder computes, a folder in the layout of a family gives the same logits or is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import get_args

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UserError
from attn_models.adapters.base import TRAINED
from attn_models.adapters.registry import ADAPTERS, decoder_adapter
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_schema.decoder import DecoderConfig, FeedForwardKind, Norm, NormPlace, Positions, Routing
from attn_testing.families import FAMILIES

transformers = pytest.importorskip("transformers")

FLAG = (False, True)
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"kind": "llama3", "low": 1.0, "high": 4.0}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2}
VALUES = {
    "vocab_size": (67,),
    "max_seq_len": (40,),
    "hidden_size": (48,),
    "num_layers": (3,),
    "num_heads": (2, 8),
    "num_kv_heads": (1, 4, None),
    "head_dim": (4, 16, None),
    "norm": get_args(Norm),
    "norm_eps": (0.1,),
    "norm_place": get_args(NormPlace),
    "feed_forward": get_args(FeedForwardKind),
    "intermediate_size": (40, None),
    "positions": get_args(Positions),
    "rope_theta": (300.0,),
    "partial_rotary_factor": (0.5, 1.0),
    "rope_interleave": FLAG,
    "rope_scaling": (None, {"kind": "linear", "factor": 2.0}, YARN, LLAMA3, YARN | {"attention": 1.3}),
    "position_offset": (2,),
    "scale_embedding": FLAG,
    "embedding_multiplier": (2.5, 1.0),
    "embedding_norm": FLAG,
    "residual_multiplier": (0.3, 1.0),
    "logit_scale": (0.5, 1.0),
    "final_logit_softcapping": (None, 3.0),
    "tie_word_embeddings": FLAG,
    "bias": FLAG,
    "attention_bias": (None, *FLAG),
    "attention_output_bias": (None, *FLAG),
    "feed_forward_bias": (None, *FLAG),
    "norm_bias": (None, *FLAG),
    "unembedding_bias": FLAG,
    "kv_sharing": ("cla:2",),
    "num_experts_per_tok": (1,),
    "routing": get_args(Routing),
    "router_bias": FLAG,
    "n_shared_experts": (None, 1),
    "shared_expert_gate": FLAG,
    "moe_intermediate_size": (24, None),
    "n_group": (2, None),
    "topk_group": (1, None),
    "routed_scaling_factor": (1.7, 1.0),
    "first_k_dense_replace": (0, 1),
    "decoder_sparse_step": (1, 2),
    "num_nextn_predict_layers": (0, 1),
}
TOGETHER = (
    *(MIXTURE | {"routing": routing} for routing in get_args(Routing)),
    MIXTURE | {"n_shared_experts": 1, "shared_expert_gate": True},
    MIXTURE | {"n_shared_experts": 2, "moe_intermediate_size": 16, "routing": "deepseek_v3"},
    {"num_experts": 6},
    {"n_group": 2, "topk_group": 1},
    {"tie_word_embeddings": False, "unembedding_bias": True},
    {"positions": "learned", "position_offset": 2},
)
GEMMA = "attn-variants/gemma"
CHOICES = (
    ("attn-variants/mha", {"num_kv_heads": 4}),
    ("attn-variants/gqa", {}),
    ("attn-variants/mha", {"rotary": None, "num_kv_heads": 4}),
    ("attn-variants/sliding_window", {"window": 4}),
    ("attn-variants/alibi", {"rotary": None}),
    ("attn-variants/sink", {}),
    ("attn-variants/sink", {"window": 3}),
    ("attn-variants/linear", {"rotary": None, "num_kv_heads": 4}),
    ("attn-variants/mla", {"latent": 8, "rotary_size": 4}),
    ("attn-gated/gated", {}),
    (GEMMA, {"norm_eps": None, "cap": 2.0}),
    (GEMMA, {"norm_eps": None, "scale": 0.7}),
    (GEMMA, {"norm_eps": None, "window": 4}),
    (GEMMA, {"norm_eps": 0.01}),
    (GEMMA, {"norm_eps": None, "base": 77.0}),
    (GEMMA, {"norm_eps": None, "chunk": 4}),
    (GEMMA, {"norm_eps": None, "temperature": 0.5, "temperature_floor": 3}),
)
CASES = [(family, case) for family in FAMILIES for case in FAMILIES[family] if case != "long"]
QUICK = {"llama", "mixtral", "gpt2", "gemma2", "granite", "falcon"}
TOKENS = torch.randint(1, 60, (1, 20), generator=torch.Generator().manual_seed(1))


def changed(plain):
    """Fields of a decoder, each with one change, by what it is."""
    for name, values in VALUES.items():
        for value in values:
            yield f"{name}={value}", plain | {name: value}
    for fields in TOGETHER:
        yield str(fields), plain | fields
    layers = plain["num_layers"]
    for mechanism, options in CHOICES:
        own = {"mechanism": mechanism, "options": options}
        yield f"{mechanism} {options}", plain | {"pattern": []} | own
        usual = plain["pattern"] or [{"mechanism": plain["mechanism"], "options": plain["options"]}]
        each = [usual[layer % len(usual)] for layer in range(layers)]
        yield f"one layer {mechanism} {options}", plain | {"pattern": [*each[:-1], own]}


def drawn(config, layout):
    """A decoder with every weight far from its initial value, so that each one counts; but those that a layout has not
    are as it takes for granted."""
    torch.manual_seed(0)
    model = Decoder(config).eval()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            constant = decoder_adapter(layout).constant(name)
            if constant is not None:
                weight.fill_(constant)
            elif weight.is_floating_point():
                weight.normal_(mean=float("norm" in name), std=0.2)
    return model


def described(family, case):
    values = transformers.AutoConfig.for_model(family, **FAMILIES[family][case]).to_dict()
    return decoder_adapter(family).from_hf_config(values)


@torch.no_grad()
def outcome(folder, values, layout, read):
    """What writing a decoder of these fields comes to."""
    try:
        model = drawn(DecoderConfig.from_plain(values), layout)
        expected = model(TOKENS)
    except UserError:
        return "no decoder"
    if not expected.isfinite().all():
        return "no decoder"
    try:
        save_model(folder, model, layout=layout)
    except (Incompatible, InvalidValue):
        return "refused"
    try:
        found = read(folder)
    except CheckpointInvalid:
        return "refused"
    if found is None:
        return "not computed by transformers"
    apart = (found - expected).abs().max().item()
    return "equal" if apart < 1e-4 else f"differs by {apart:.2g}"


def ours(folder):
    return load_model(folder).model(TOKENS)


def theirs(folder):
    """The logits of transformers; None where it cannot compute the model, such as windows without a number."""
    # Tokens that their config classes name by default are not among these few.
    written = folder / "config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"pad_token_id": None}))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32")
        return model.eval()(TOKENS).logits
    except Exception:  # noqa: BLE001  (whatever they raise for a config that means nothing to them)
        return None


def sweep(family, case, folder, read):
    plain = described(family, case).plain()
    found = {
        words: outcome(folder / str(number), values, family, read)
        for number, (words, values) in enumerate([("as it is", plain), *changed(plain)])
    }
    print(f"{family} {case}: {dict(Counter(what.split(' by ')[0] for what in found.values()))}")
    assert found.pop("as it is") == "equal"
    assert {words: what for words, what in found.items() if what.startswith("differs")} == {}
    assert set(found.values()) >= {"equal", "refused"}


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(*case, marks=[] if case[0] in QUICK and not case[1] else pytest.mark.oracle) for case in CASES],
    ids=[", ".join(filter(None, case)) for case in CASES],
)
def test_every_change_of_a_decoder_is_written_and_read_again_or_refused(family, case, tmp_path):
    sweep(family, case, tmp_path, ours)


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize(("family", "case"), CASES, ids=[", ".join(filter(None, case)) for case in CASES])
def test_every_change_of_a_decoder_that_is_written_gives_transformers_the_same_logits(family, case, tmp_path):
    transformers.logging.disable_progress_bar()
    sweep(family, case, tmp_path, theirs)


def test_every_field_of_a_decoder_that_is_computed_is_changed():
    swept = {*VALUES, *(name for fields in TOGETHER for name in fields), "mechanism", "options", "pattern"}
    assert {field.name for field in dataclasses.fields(DecoderConfig)} - set(TRAINED) == swept


def test_transformers_reads_a_deepseek_v2_whose_numbers_were_whole(tmp_path):
    plain = described("deepseek_v2", "").plain()
    assert outcome(tmp_path, plain | {"attention_dropout": 0}, "deepseek_v2", theirs) == "equal"


def test_every_layout_of_decoders_is_swept():
    general = {name for name, adapter in ADAPTERS.items() if adapter.Config is DecoderConfig}
    assert general - {"attn_decoder", "qwen3_next"} == set(FAMILIES)


def test_gains_that_a_layout_has_not_are_refused_where_they_are_not_one(tmp_path):
    model = drawn(described("llama4_text", ""), "llama4_text")
    with torch.no_grad():
        model.blocks[0].attention.norm.key_gain[0] = 2
    with pytest.raises(Incompatible, match=r"blocks\.0\.attention\.norm\.key_gain"):
        save_model(tmp_path, model, layout="llama4_text")


@pytest.mark.parametrize(
    "field", ["embedding_multiplier", "residual_multiplier", "logit_scale", "final_logit_softcapping"]
)
@pytest.mark.parametrize("layout", ["llama", "gpt2"])
def test_a_multiplier_that_a_layout_has_no_key_for_is_refused_by_its_name(layout, field):
    plain = described(layout, "").plain()
    with pytest.raises(Incompatible, match=field):
        decoder_adapter(layout).to_hf_config(DecoderConfig.from_plain(plain | {field: 0.25}))
