"""Whatever a config.json with an image tower says, a folder gives transformers' logits or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.adapters.registry import decoder_adapter
from attn_models.loading import load_model
from attn_testing.config_changes import changes, require_right, verdict

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.timeout(1200)]
IMAGE_TOKEN = 60
CONFIG = {
    "text_config": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 36,
        "patch_size": 6,
    },
    "image_token_id": IMAGE_TOKEN,
    "scale_factor": 2,
}


def their_logits(folder, tokens, pixels):
    """The logits of transformers for the config.json in `folder`, where the weights go; None where it has none."""
    torch.manual_seed(0)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = transformers.AutoModelForImageTextToText
        model = kind.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.normal_(mean=float("norm" in name), std=0.2)
            model.save_pretrained(folder / "written")
            (folder / "written" / "model.safetensors").rename(folder / "model.safetensors")
            again = kind.from_pretrained(folder, attn_implementation="eager", dtype="float32").eval()
            logits = again(input_ids=tokens[None], pixel_values=pixels[None]).logits[0]
    except Exception:  # noqa: BLE001  (whatever they raise for a config that means nothing)
        return None
    return logits if logits.isfinite().all() else None


@torch.no_grad()
def outcome(folder, values):
    """What loading the folder comes to, beside transformers; without their weights, what reading the config does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    torch.manual_seed(1)
    tokens, pixels = torch.randint(1, 30, (20,)), torch.randn(1, 3, 36, 36)
    tokens[4:13] = IMAGE_TOKEN
    theirs = their_logits(folder, tokens, pixels)

    def ours():
        # The prompt has the image tokens of the config as it was, so that a changed one can only be built.
        if theirs is None:
            return built(values)
        model = load_model(folder).model
        with model.seeing(tokens[None], pixels[None]):
            return model(tokens[None])[0]

    return verdict(theirs, ours)


def built(values):
    """A model of this config with random weights; raises `UserError` where it is refused."""
    adapter = decoder_adapter(values.get("model_type"))
    check_unread_keys(values, adapter.known_keys, Path("config.json"))
    return adapter.build(adapter.from_hf_config(values)).eval()


@pytest.mark.parametrize("part", ["", "text_config", "vision_config"])
def test_every_change_of_a_config_gives_the_logits_of_transformers_or_is_refused(part, tmp_path, record_property):
    transformers.logging.disable_progress_bar()
    whole = transformers.AutoConfig.for_model("smolvlm", **CONFIG).to_dict()
    changed = [
        (words, whole | {part: values} if part else values)
        for words, values in changes(whole[part] if part else whole)
        # Without a part there is a whole Llama of 7 billion numbers.
        if not words.startswith(("text_config", "vision_config"))
    ]
    found = {
        f"{number}, {words}": outcome(tmp_path / str(number), values) for number, (words, values) in enumerate(changed)
    }
    record_property("outcomes", require_right(part or "top", found, equal=30))
