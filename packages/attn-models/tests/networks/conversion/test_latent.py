import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_models.conversion import convert_latent, latent_attention
from attn_models.conversion.latent import factorised
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model

TOKENS = torch.arange(24).view(2, 12) % 31
MODELS = {
    "multi-head with biases": {"bias": True},
    "multi-head with rotary positions": {"positions": "rotary", "rope_interleave": True},
    "grouped with rotary positions": {"mechanism": "gqa", "num_kv_heads": 2, "positions": "rotary"},
    "grouped with wide heads": {"mechanism": "gqa", "num_kv_heads": 2, "head_dim": 6, "bias": True},
}


def decoder(config):
    torch.manual_seed(0)
    model = Decoder(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_at_full_rank_nothing_changes(tiny, fields):
    model = decoder(tiny(**fields))
    converted, energy = latent_attention(model)
    assert energy == pytest.approx(1, abs=1e-12)
    assert torch.allclose(converted(TOKENS), model(TOKENS), rtol=0, atol=1e-11)


def test_a_latent_as_large_as_the_rank_of_the_weights_changes_nothing(tiny):
    model = decoder(tiny(positions="rotary"))
    with torch.no_grad():
        for block in model.blocks:
            basis = torch.randn(5, 16, dtype=torch.float64)
            for linear in (block.attention.key, block.attention.value):
                linear.weight.copy_(torch.randn(16, 5, dtype=torch.float64) @ basis / 5)
    converted, energy = latent_attention(model, 5)
    assert energy == pytest.approx(1, abs=1e-12)
    assert torch.allclose(converted(TOKENS), model(TOKENS), rtol=0, atol=1e-10)
    specs = converted.state_specs()["blocks.0"]
    assert specs["latent"].row_bytes("float64") == 5 * 8


def test_less_energy_is_kept_by_a_smaller_latent_and_the_outputs_are_further_off(tiny):
    model = decoder(tiny(positions="rotary"))
    found = [latent_attention(model, latent) for latent in (15, 10, 5, 1)]
    energies = [energy for _, energy in found]
    errors = [(converted(TOKENS) - model(TOKENS)).square().mean().item() for converted, _ in found]
    assert 1 > energies[0] > energies[1] > energies[2] > energies[3] > 0
    assert errors[0] < errors[1] < errors[2]


def test_no_factors_of_that_rank_are_nearer_than_those_found():
    key, value = torch.randn(6, 9, dtype=torch.float64), torch.randn(8, 9, dtype=torch.float64)
    parts = factorised(key, value, 4)
    whole, found = torch.cat([key, value]), torch.cat([parts.key, parts.value]) @ parts.down
    values = torch.linalg.svdvals(whole)
    assert (whole - found).square().sum().item() == pytest.approx(values[4:].square().sum().item(), rel=1e-12)
    assert parts.kept / parts.energy == pytest.approx((values[:4].square().sum() / values.square().sum()).item())


@pytest.mark.parametrize("latent", [0, 17, 2.5])
def test_a_latent_outside_the_rank_is_refused(tiny, latent):
    with pytest.raises(InvalidValue, match="1 to 16, the full rank"):
        latent_attention(decoder(tiny()), latent)


@pytest.mark.parametrize("fields", [{"mechanism": "sliding_window", "options": {"window": 3}}, {"mechanism": "linear"}])
def test_other_attention_is_refused(tiny, fields):
    with pytest.raises(Incompatible):
        latent_attention(decoder(tiny(**fields)))


@pytest.mark.parametrize("layout", ["llama", "gpt2"])
def test_a_converted_folder_is_loaded_and_says_what_the_model_said(tiny, tmp_path, layout):
    fields = {"positions": "rotary", "norm": "rms", "feed_forward": "swiglu"} if layout == "llama" else {"bias": True}
    model = decoder(tiny(**fields)).float()
    save_model(tmp_path / "before", model, layout=layout)
    converted = convert_latent(tmp_path / "before", tmp_path / "after")
    assert (converted.layout, converted.energy) == ("attn_decoder", pytest.approx(1))
    loaded = load_model(tmp_path / "after").model
    assert torch.allclose(loaded(TOKENS), model(TOKENS), rtol=0, atol=1e-4)


def test_a_converted_model_decodes_what_it_computes_at_once(tiny, stepwise):
    converted, _ = latent_attention(decoder(tiny(mechanism="gqa", num_kv_heads=2, positions="rotary")), 7)
    prompt = list(range(10))
    decoded = stepwise(converted, [prompt], [[4, 1, 3, 1, 1]])[0]
    with torch.no_grad():
        assert torch.allclose(decoded, converted(torch.tensor([prompt]))[0], rtol=0, atol=1e-11)
