import json

import pytest
import torch
from attn_core.errors import Incompatible, UnknownName
from attn_models import commands
from attn_models.conversion import convert_mechanism, other_mechanism
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.tokenizers import character_tokenizer
from typer.testing import CliRunner

TOKENS = torch.arange(24).view(2, 12) % 31


def decoder(config):
    torch.manual_seed(0)
    model = Decoder(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def test_performer_approaches_the_softmax_that_it_was_converted_from(tiny):
    model = decoder(tiny())
    errors = []
    for features in (16, 256, 8192):
        converted, energy = other_mechanism(model, "performer", {"features": features})
        assert energy == 1
        errors.append((converted(TOKENS) - model(TOKENS)).square().mean().sqrt().item())
    assert errors[0] > 1.5 * errors[1] > 1.5**2 * errors[2]
    for name, weight in model.named_parameters():
        assert torch.equal(converted.get_parameter(name), weight)


def test_a_mechanism_that_computes_the_same_changes_nothing(tiny):
    model = decoder(tiny(positions="rotary"))
    converted, energy = other_mechanism(model, "sliding_window", {"window": 64})
    assert energy == 1
    torch.testing.assert_close(converted(TOKENS), model(TOKENS), rtol=0, atol=1e-12)


def test_weights_that_only_the_new_mechanism_has_are_drawn_from_the_seed(tiny):
    model = decoder(tiny())
    one, again, other = (other_mechanism(model, "gated", {}, seed=seed) for seed in (1, 1, 2))
    assert 0 < one[1] == again[1] < 1
    assert torch.equal(one[0](TOKENS), again[0](TOKENS))
    assert not torch.equal(one[0](TOKENS), other[0](TOKENS))


def test_what_cannot_be_converted_is_refused(tiny):
    with pytest.raises(Incompatible, match="rotary"):
        other_mechanism(decoder(tiny(positions="rotary")), "performer", {})
    with pytest.raises(UnknownName, match="performed"):
        other_mechanism(decoder(tiny()), "performed", {})


def test_the_command_writes_a_model_and_says_its_losses(tiny, tmp_path):
    tokenizer = character_tokenizer("to be or not")
    model = Decoder(tiny(vocab_size=tokenizer.vocab_size))
    folder = save_model(tmp_path / "before", model, tokenizer)
    (tmp_path / "text").write_text("to be or not to be")
    words = [folder, tmp_path / "after", "--mechanism", "performer", "-o", "features=32", "--text", tmp_path / "text"]
    result = CliRunner().invoke(commands.app, ["mechanism", *map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["loss_after"] != said["loss_before"] > 0
    again = load_model(tmp_path / "after")
    assert again.config.options == {"features": 32}
    direct, _ = other_mechanism(load_model(folder).model, "performer", {"features": 32})
    ids = torch.tensor([tokenizer.encode("to be or not")])
    torch.testing.assert_close(again.model(ids), direct.eval()(ids))
    with pytest.raises(UnknownName):
        convert_mechanism(folder, tmp_path / "other", "performed", {})
    assert not (tmp_path / "other").exists()
