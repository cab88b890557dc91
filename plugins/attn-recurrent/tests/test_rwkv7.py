"""RWKV-7 beside a loop over its equations, and its checkpoints beside a model that is written out from them."""

import json

import pytest
import torch
from attn_core import configure
from attn_core.errors import InvalidValue
from attn_models.loading import load_model, save_model
from attn_recurrent.rwkv7 import Rwkv7, Rwkv7Channel
from attn_recurrent.rwkv7.layer import ChannelMixLayer, Rwkv7Layer
from attn_testing import Agreement, ModelLaws
from attn_testing.checkpoints import require_same_parameters
from attn_testing.memory import stepped_logits
from safetensors.torch import save_file
from torch.nn.functional import group_norm, layer_norm, linear, normalize

RWKV7 = Rwkv7()
WIDTH, HEADS, LAYERS, RANKS = 16, 2, 3, {"w": 5, "a": 3, "g": 4, "v": 2}


def tensors(layers):
    """Tensors with the names of a published checkpoint, all far from neutral values."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, mean=0.0):
        return torch.randn(shape, generator=generator) * 0.4 + mean

    found = {"model.embeddings.weight": draw(31, WIDTH), "lm_head.weight": draw(31, WIDTH)}
    norms = ["model.norm", "model.layers.0.pre_norm"]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        norms += [f"{at}.attn_norm", f"{at}.ffn_norm", f"{at}.attn.g_norm"]
        found |= {f"{at}.attn.x_{name}": draw(1, 1, WIDTH, mean=0.5) for name in "rwkvag"}
        found |= {f"{at}.attn.k_k": draw(WIDTH, mean=0.8), f"{at}.attn.k_a": draw(WIDTH, mean=1.0)}
        found |= {f"{at}.attn.r_k": draw(HEADS, WIDTH // HEADS)}
        found |= {f"{at}.attn.{name}_proj.weight": draw(WIDTH, WIDTH) for name in "rkvo"}
        for name, rank in RANKS.items():
            if name == "v" and layer == 0:
                continue
            found[f"{at}.attn.{name}_lora.lora.0.weight"] = draw(rank, WIDTH)
            found[f"{at}.attn.{name}_lora.lora.2.weight"] = draw(WIDTH, rank)
            if name != "g":
                found[f"{at}.attn.{name}_lora.lora.2.bias"] = draw(WIDTH)
        found |= {f"{at}.ffn.x_k": draw(WIDTH, mean=0.5), f"{at}.ffn.key.weight": draw(32, WIDTH)}
        found[f"{at}.ffn.value.weight"] = draw(WIDTH, 32)
    return found | {f"{norm}.{leaf}": draw(WIDTH, mean=float(leaf == "weight")) for norm in norms
                    for leaf in ("weight", "bias")}  # fmt: skip


def time_mixing(x, at, first):
    """The outputs of one layer for rows [tokens, width], token by token, and its values; `at` finds its tensors."""
    before, out, values, state = torch.zeros(WIDTH).to(x), [], [], torch.zeros(HEADS, WIDTH // HEADS, WIDTH // HEADS)
    state = state.to(x)
    for t, now in enumerate(x):
        r, w, k, v, a, g = (now + (before - now) * at(f"x_{name}").flatten() for name in "rwkvag")
        before = now

        def lora(name, row, act=lambda rows: rows):
            bias = at(f"{name}_lora.lora.2.bias") if name != "g" else None
            return linear(act(linear(row, at(f"{name}_lora.lora.0.weight"))), at(f"{name}_lora.lora.2.weight"), bias)

        decay = torch.exp(-(torch.tensor(-0.5).to(x).exp()) * lora("w", w, torch.tanh).sigmoid())
        rate, gate = lora("a", a).sigmoid(), lora("g", g, torch.sigmoid)
        receptance, key, value = (
            linear(r, at("r_proj.weight")),
            linear(k, at("k_proj.weight")),
            linear(v, at("v_proj.weight")),
        )
        values.append(value)
        if first is not None:
            value = value + (first[t] - value) * lora("v", v).sigmoid()
        removed = normalize((key * at("k_k")).view(HEADS, -1), dim=-1)
        key = key * (1 + (rate - 1) * at("k_a"))
        receptance, key, value, decay, rate = (one.view(HEADS, -1) for one in (receptance, key, value, decay, rate))
        held = (state * removed[:, None, :]).sum(-1)
        state = (
            state * decay[:, None, :]
            - held[:, :, None] * (removed * rate)[:, None, :]
            + value[:, :, None] * key[:, None, :]
        )
        read = (state * receptance[:, None, :]).sum(-1)
        normed = group_norm(read.view(1, -1), HEADS, at("g_norm.weight"), at("g_norm.bias"), 1e-5 * WIDTH / HEADS)[0]
        bonus = ((receptance * key * at("r_k")).sum(-1, keepdim=True) * value).flatten()
        out.append(linear((normed + bonus) * gate, at("o_proj.weight")))
    return torch.stack(out), torch.stack(values)


def logits(known, tokens):
    """The logits [tokens, vocabulary] of the tensors of a checkpoint, written out from the paper."""

    def norm(rows, name):
        return layer_norm(rows, (WIDTH,), known[f"{name}.weight"], known[f"{name}.bias"])

    x, first = norm(known["model.embeddings.weight"][tokens], "model.layers.0.pre_norm"), None
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        mixed, values = time_mixing(norm(x, f"{name}.attn_norm"), lambda part: known[f"{name}.attn.{part}"], first)  # noqa: B023
        first = values if layer == 0 else first
        x = x + mixed
        rows = norm(x, f"{name}.ffn_norm")
        before = torch.cat([torch.zeros_like(rows[:1]), rows[:-1]])
        entering = rows + (before - rows) * known[f"{name}.ffn.x_k"]
        x = x + linear(linear(entering, known[f"{name}.ffn.key.weight"]).relu() ** 2, known[f"{name}.ffn.value.weight"])
    return linear(norm(x, "model.norm"), known["lm_head.weight"])


CONFIG = {
    "model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "vocab_size": 31, "hidden_size": WIDTH, "head_dim": 8,
    "num_heads": 2, "num_hidden_layers": LAYERS, "decay_low_rank_dim": 5, "a_low_rank_dim": 3, "gate_low_rank_dim": 4,
    "v_low_rank_dim": 2, "intermediate_size": 32, "hidden_act": "sqrelu", "value_dim": [WIDTH] * LAYERS, "attn": None,
    "norm_eps": 1e-5, "norm_bias": True, "norm_first": True, "fuse_norm": True, "attn_mode": "chunk",
    "hidden_ratio": 4.0, "max_position_embeddings": 64, "tie_word_embeddings": False, "use_l2warp": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    save_file(tensors(LAYERS), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@torch.no_grad()
def test_a_published_checkpoint_gives_the_logits_of_the_equations(folder, record_property):
    loaded, tokens = load_model(folder), torch.randint(31, (41,), generator=torch.Generator().manual_seed(1))
    known = {name: tensor.double() for name, tensor in tensors(LAYERS).items()}
    expected = logits(known, tokens)
    same = Agreement(record_property, "rwkv7", paper="the equations of a whole model, token by token")
    same.outputs(loaded.model.double()(tokens[None])[0], expected, 1e-10)
    model = load_model(folder).model
    torch.testing.assert_close(stepped_logits(model, tokens, [6, 33, 1, 1]), expected.float(), rtol=1e-4, atol=2e-4)


def test_both_halves_and_their_gradients_are_those_of_the_equations(folder, record_property):
    model = load_model(folder).model.double()
    mixing, channel = (
        next(part for part in model.modules() if isinstance(part, kind)) for kind in (Rwkv7Layer, ChannelMixLayer)
    )
    known = {name: tensor.double() for name, tensor in tensors(LAYERS).items()}
    rows = torch.randn(9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def channel_mixing(given):
        entering = given + (torch.cat([torch.zeros_like(given[:1]), given[:-1]]) - given) * at("ffn.x_k").flatten()
        return linear(linear(entering, at("ffn.key.weight")).relu() ** 2, at("ffn.value.weight"))

    def at(part):
        return known[f"model.layers.0.{part}"]

    loops = Agreement(record_property, "rwkv7", paper="the equations, token by token")
    loops.functions(
        lambda given: mixing(given[None])[0],
        lambda given: time_mixing(given, lambda part: at(f"attn.{part}"), None)[0],
        rows,
        tolerance=1e-10,
    )
    loops = Agreement(record_property, "rwkv7_channel", paper="the equations")
    loops.functions(lambda given: channel(given[None])[0], channel_mixing, rows, tolerance=1e-10)


def test_it_is_written_as_it_was_read(folder, tmp_path):
    loaded = load_model(folder)
    save_model(tmp_path / "again", loaded.model, layout="rwkv7")
    require_same_parameters(load_model(tmp_path / "again").model, loaded.model)


def test_chunks_of_any_size_give_the_same():
    rows, found = torch.randn(2, 70, 16, dtype=torch.float64), []
    for chunk in (1, 7, 64):
        torch.manual_seed(0)
        layer = RWKV7.build(configure(RWKV7, {"chunk": chunk}, hidden_size=16, num_heads=2)).double()
        found.append(layer(rows))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[2], found[0], rtol=1e-9, atol=1e-9)


def test_the_fastest_decay_stays_finite_and_learns_within_the_largest_chunk():
    layer = RWKV7.build(configure(RWKV7, {"chunk": 64}, hidden_size=16, num_heads=2))
    torch.nn.init.constant_(layer.decay.up.bias, 30.0)
    layer(torch.randn(1, 64, 16)).sum().backward()
    assert all(weight.grad.isfinite().all() for weight in layer.parameters())


@pytest.mark.parametrize(
    ("mechanism", "options", "message"),
    [
        (Rwkv7(), {"chunk": 65}, "chunk: 65"),
        (Rwkv7(), {"decay_rank": 0}, "decay_rank: 0"),
        (Rwkv7(), {"norm_eps": 0.0}, "norm_eps: 0"),
        (Rwkv7Channel(), {"inner": 0}, "inner: 0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(mechanism, options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(mechanism, options, hidden_size=16, num_heads=2)


TIME = {"mechanism": "rwkv7", "options": {"decay_rank": 5, "rate_rank": 3, "gate_rank": 4}}
CHANNEL = {"mechanism": "rwkv7_channel", "options": {"inner": 24}}


class TestFamily(ModelLaws):
    family = "rwkv7"
    configs = {
        "both in turns": {"vocab_size": 31, "max_seq_len": 32, "hidden_size": 16, "num_layers": 4, "num_heads": 2}
        | {"feed_forward": "none", "positions": "none", "value_rank": 2, "pattern": [TIME, CHANNEL]}
    }
