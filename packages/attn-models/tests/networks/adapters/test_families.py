"""Every family that transformers has too gives its logits: whole, in steps, padded, written again, and in int8."""

from __future__ import annotations

import json

import pytest
import torch
from attn_models.adapters.families import FAMILIES
from attn_models.loading import load_model, save_model
from attn_testing.checkpoints import require_same_parameters
from attn_testing.families import FAMILIES as TINY

transformers = pytest.importorskip("transformers")
DESCRIBED = {adapter.model_type for adapter in FAMILIES}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
BOUND = {"rtol": 0, "atol": 1e-5, "check_dtype": False}
"""Norms, rotary positions and the softmax are computed in float32 there, all of Mamba-2's scan too."""
CASES = [(family, name) for family in sorted(DESCRIBED) for name in TINY[family]]


@pytest.fixture(params=CASES, ids=lambda case: ", ".join(part for part in case if part))
def peer(request):
    """A random model of transformers in float64, every weight far from its initial value so that each one counts."""
    family, name = request.param
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **TINY[family][name])
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name or "ln_" in name), std=0.2)
    return model


def test_a_checkpoint_of_transformers_gives_its_logits_whole_and_in_steps(peer, tmp_path, stepwise):
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path, "float64").model
    prompts = [torch.randint(61, (length,)).tolist() for length in (20, 7)]
    plan = [[6, 9, 1, 1, 1, 1, 1], [0, 3, 1, 1, 1, 1, 0]]
    with torch.no_grad():
        wholes = [peer(torch.tensor([prompt])).logits[0] for prompt in prompts]
        for prompt, whole, stepped in zip(prompts, wholes, stepwise(model, prompts, plan), strict=True):
            torch.testing.assert_close(model(torch.tensor([prompt]))[0], whole, **BOUND)
            torch.testing.assert_close(stepped, whole, **BOUND)


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.oracle)])
def test_the_rows_of_a_padded_batch_of_transformers_are_ours_without_padding(peer, side, tmp_path):
    if side == "left" and getattr(peer.config, "attn_temperature_tuning", False):
        pytest.skip("the temperature of a row counts padding in transformers")
    # In float64 the softmax of theirs is still float32, where the mask of rows of padding alone gives no number.
    peer.float().save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    prompts, longest = [torch.randint(61, (length,)) for length in (12, 1, 7)], 12
    tokens, keep = torch.zeros(3, longest, dtype=torch.int64), torch.zeros(3, longest, dtype=torch.int64)
    places = [slice(longest - len(prompt), None) if side == "left" else slice(len(prompt)) for prompt in prompts]
    for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        tokens[row, place], keep[row, place] = prompt, 1
    positions = (
        {} if peer.config.model_type in ("bloom", "mpt") else {"position_ids": (keep.cumsum(1) - 1).clamp(min=0)}
    )
    with torch.no_grad():
        theirs = peer(tokens, attention_mask=keep, **positions).logits
        for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
            torch.testing.assert_close(model(prompt[None])[0], theirs[row, place], **BOUND)


@pytest.mark.oracle
def test_transformers_reads_what_is_written_in_its_layout(peer, tmp_path):
    peer.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs", "float64")
    if (loaded.config.rope_scaling or {}).get("kind") == "longrope":
        pytest.skip("the long context is not known to the decoder that was read")
    save_model(tmp_path / "ours", loaded.model, layout=peer.config.model_type)
    require_same_parameters(load_model(tmp_path / "ours", "float64").model, loaded.model)
    written = tmp_path / "ours" / "config.json"
    # Tokens that their config classes name by default are not among these few.
    written.write_text(json.dumps(json.loads(written.read_text()) | {"pad_token_id": None}))
    again = type(peer).from_pretrained(tmp_path / "ours", dtype="float64", **EAGER).double().eval()
    tokens = torch.randint(61, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, peer(tokens).logits)


@pytest.mark.oracle
def test_int8_weights_change_the_logits_by_little(peer, tmp_path):
    peer.save_pretrained(tmp_path)
    tokens = torch.randint(61, (2, 16))
    with torch.no_grad():
        exact, packed = (load_model(tmp_path, "float32", quantization=one).model(tokens) for one in ("auto", "int8"))
    assert 0 < (packed - exact).norm() / exact.norm() < 0.1


def test_every_family_that_is_described_is_compared():
    assert {case[0] for case in CASES} == DESCRIBED


TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gpt_neox", "falcon", "gpt_oss", "llama4_text", "mamba2"])
def test_the_tokenizer_and_chat_template_that_transformers_saved_beside_a_model_are_used(family, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<|end|>": 0, "<|user|>": 1, "hello": 2, "there": 3, "?": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|end|>", additional_special_tokens=["<|user|>"], chat_template=TURNS
    )
    config = transformers.AutoConfig.for_model(family, **TINY[family][""])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path).tokenizer
    messages = [{"role": "user", "content": "hello there"}]
    assert ours.encode("hello there") == theirs.encode("hello there") == [2, 3]
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)
