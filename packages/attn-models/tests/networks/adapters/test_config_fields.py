"""Whatever a config.json of transformers says, a folder gives transformers' logits or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.adapters.registry import decoder_adapter
from attn_models.loading import load_model
from attn_testing.config_changes import changes, require_right, verdict
from attn_testing.families import FAMILIES

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.timeout(1200)]

CASES = [(family, case) for family in FAMILIES for case in FAMILIES[family]]


def their_logits(folder, ids):
    """The logits [1, token, vocab] of transformers for the config.json in `folder`, where the weights go; None where
    it cannot compute them.

    Every weight is far from its initial value, so that each one counts.
    """
    torch.manual_seed(0)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.normal_(mean=float("norm" in name or "ln_" in name), std=0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.3)
            model.save_pretrained(folder / "written")
            (folder / "written" / "model.safetensors").rename(folder / "model.safetensors")
            again = type(model).from_pretrained(folder, attn_implementation="eager", dtype="float32").eval()
            logits = again(ids).logits
    except Exception:  # noqa: BLE001  (whatever they raise for a config that means nothing)
        return None
    return logits if logits.isfinite().all() else None


def built(values):
    """A decoder of this config with random weights; raises `UserError` where it is refused."""
    adapter = decoder_adapter(values.get("model_type"))
    check_unread_keys(values, adapter.known_keys, Path("config.json"))
    return adapter.build(adapter.from_hf_config(values)).eval()


@torch.no_grad()
def outcome(folder, values, ids):
    """What loading the folder comes to, beside transformers; without their weights, what reading the config does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    theirs = their_logits(folder, ids)
    return verdict(theirs, lambda: (built(values) if theirs is None else load_model(folder).model)(ids))


@pytest.mark.parametrize(("family", "case"), CASES, ids=[", ".join(filter(None, case)) for case in CASES])
def test_every_change_of_a_config_gives_the_logits_of_transformers_or_is_refused(
    family, case, tmp_path, record_property
):
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family][case])
    ids = torch.randint(1, 30, (1, 20), generator=torch.Generator().manual_seed(1))
    found = {
        f"{number}, {words}": outcome(tmp_path / str(number), values, ids if values.get("vocab_size") != 1 else 0 * ids)
        for number, (words, values) in enumerate(changes(config.to_dict()))
    }
    record_property("outcomes", require_right(f"{family} {case}", found, equal=30))


def test_a_folder_as_it_is_gives_the_logits_of_transformers(tmp_path):
    ids = torch.randint(1, 30, (1, 20), generator=torch.Generator().manual_seed(1))
    for family, case in CASES:
        config = transformers.AutoConfig.for_model(family, **FAMILIES[family][case])
        assert outcome(tmp_path / f"{family} {case}", config.to_dict(), ids) == "equal", (family, case)
