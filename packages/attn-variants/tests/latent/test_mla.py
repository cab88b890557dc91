import pytest
import torch
from attn_core import RaggedBatch, Rotary, Step, configure, installed, state_bytes
from attn_core.errors import InvalidValue
from attn_testing.memory import DictionaryStore
from attn_variants.compute.rotary import cos_sin_to

WIDTH, HEADS, LATENT, ROTATED, NOPE, VALUE = 24, 3, 10, 4, 5, 6
OPTIONS = {"latent": LATENT, "rotary_size": ROTATED, "nope_size": NOPE, "value_size": VALUE}


def memory_of(layer, rows):
    cos_sin = cos_sin_to(layer.rotary, layer.rotated, rows.shape[1], rows)
    return layer.queries(rows, cos_sin), layer.memory(rows, cos_sin)


def by_hand(layer, rows):
    """The equations of the paper, a token, a head and a key at a time, in complex numbers where they turn."""
    tokens, weight = rows.shape[0], {name: p.detach() for name, p in layer.named_parameters()}

    def turned(pairs, position):
        angles = position * 10000.0 ** (-2 * torch.arange(ROTATED // 2, dtype=torch.float64) / ROTATED)
        spun = torch.view_as_complex(pairs.reshape(-1, 2).clone()) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(spun).flatten()

    latent = []
    for row in rows:
        down = weight["latent.weight"] @ row
        latent.append(weight["latent_norm.weight"] * down / (down.square().mean() + 1e-6).sqrt())
    out = torch.zeros(tokens, HEADS * VALUE, dtype=torch.float64)
    for i in range(tokens):
        for h in range(HEADS):
            q = (weight["query.weight"] @ rows[i])[h * (NOPE + ROTATED) : (h + 1) * (NOPE + ROTATED)]
            q = torch.cat([q[:NOPE], turned(q[NOPE:], i)])
            energies, values = [], []
            for j in range(i + 1):
                k = (weight["key_up.weight"] @ latent[j])[h * NOPE : (h + 1) * NOPE]
                k = torch.cat([k, turned(weight["rotary_key.weight"] @ rows[j], j)])
                energies.append(q @ k / (NOPE + ROTATED) ** 0.5)
                values.append((weight["value_up.weight"] @ latent[j])[h * VALUE : (h + 1) * VALUE])
            out[i, h * VALUE : (h + 1) * VALUE] = torch.stack(energies).softmax(0) @ torch.stack(values)
    return out @ weight["output.weight"].T


def test_the_layer_equals_the_equations_of_the_paper_in_loops(build, agrees):
    layer = build("mla", OPTIONS, hidden_size=WIDTH, num_heads=HEADS)
    rows = torch.randn(6, WIDTH, dtype=torch.float64)
    agrees("mla", paper="section 2.1 in loops").outputs(layer(rows[None])[0], by_hand(layer, rows), 1e-13)


def test_absorbed_attention_equals_expanded_attention(build):
    layer = build("mla", OPTIONS | {"query_latent": 7}, hidden_size=WIDTH, num_heads=HEADS)
    query, memory = memory_of(layer, torch.randn(2, 9, WIDTH, dtype=torch.float64))
    expanded = layer.attend_expanded(layer.expand(query, memory))
    absorbed = layer.attend_absorbed(layer.absorb(query, memory))
    assert torch.allclose(absorbed, expanded, rtol=0, atol=1e-13)


def test_gradients_of_absorbed_and_expanded_attention_agree(build):
    layer = build("mla", OPTIONS, hidden_size=WIDTH, num_heads=HEADS)
    rows = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    found = []
    for way in ("expand", "absorb"):
        layer.zero_grad()
        inputs = rows.clone().requires_grad_()
        attend = layer.attend_expanded if way == "expand" else layer.attend_absorbed
        attend(getattr(layer, way)(*memory_of(layer, inputs))).square().sum().backward()
        found.append([inputs.grad, layer.key_up.weight.grad, layer.value_up.weight.grad, layer.latent.weight.grad])
    for expanded, absorbed in zip(*found, strict=True):
        assert torch.allclose(expanded, absorbed, rtol=0, atol=1e-11)


def test_what_is_remembered_is_exactly_the_normed_latent_and_the_turned_key(build):
    layer = build("mla", OPTIONS, hidden_size=WIDTH, num_heads=HEADS)
    rows = torch.randn(5, WIDTH, dtype=torch.float64)
    mla = installed().mechanisms.get("mla")
    config = configure(mla, OPTIONS, hidden_size=WIDTH, num_heads=HEADS)
    store = DictionaryStore({"layer": mla.state(config)})
    store.admit(0)
    batch = RaggedBatch.of((5,), (0,), torch.tensor)
    view = store.view(batch, [0])["layer"]
    layer.step(rows, batch, view)
    kept = view["latent"].rows([0]).fields
    _, (latent, turned) = memory_of(layer, rows[None])
    assert set(kept) == {"latent", "rotary_key"}
    assert torch.equal(kept["latent"], latent)
    assert torch.allclose(kept["rotary_key"], turned, rtol=0, atol=1e-15)


def test_deepseek_v2_remembers_576_elements_a_token_where_its_heads_would_take_32768():
    mla, mha = (installed().mechanisms.get(name) for name in ("mla", "mha"))
    sizes = {"hidden_size": 5120, "num_heads": 128, "head_dim": 128}
    latent = state_bytes(mla.state(configure(mla, **sizes)), tokens=1, dtype="bfloat16")
    heads = state_bytes(mha.state(configure(mha, **sizes)), tokens=1, dtype="bfloat16")
    assert (latent, heads) == (576 * 2, 32768 * 2)
    assert round(100 * (1 - latent / heads), 2) == 98.24


def test_deepseek_v2_with_six_bits_saves_93_percent_of_what_deepseek_67b_remembers():
    gqa, mla = (installed().mechanisms.get(name) for name in ("gqa", "mla"))
    small = state_bytes(
        mla.state(configure(mla, hidden_size=5120, num_heads=128, head_dim=128)), tokens=1, dtype="bfloat16"
    )
    grouped = configure(gqa, hidden_size=8192, num_heads=64, num_kv_heads=8)
    large = state_bytes(gqa.state(grouped), tokens=1, dtype="bfloat16")
    assert round(100 * (1 - small * 60 * 6 / 16 / (large * 95)), 2) == 93.34
    assert round(100 * (1 - small * 60 / (large * 95)), 2) == 82.24


def test_a_decoding_step_over_a_long_memory_is_priced_as_absorbed():
    mla = installed().mechanisms.get("mla")
    config = configure(mla, {"nope_size": 128, "value_size": 128}, hidden_size=1024, num_heads=8)
    prices = [mla.cost(config, Step(remembered=keys)).flops for keys in (1000, 2000)]
    assert prices[1] - prices[0] == 1000 * 2 * 8 * (576 + 512)


def test_the_models_rotary_positions_take_the_place_of_its_own(build):
    rows = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    own = build("mla", OPTIONS, hidden_size=WIDTH, num_heads=HEADS)
    other = build("mla", OPTIONS, hidden_size=WIDTH, num_heads=HEADS, rotary=Rotary(base=10000.0, interleaved=True))
    halves = build("mla", OPTIONS, hidden_size=WIDTH, num_heads=HEADS, rotary=Rotary())
    other.load_state_dict(own.state_dict())
    halves.load_state_dict(own.state_dict())
    assert torch.equal(own(rows), other(rows))
    assert not torch.allclose(own(rows), halves(rows), atol=1e-3)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"latent": 0}, "latent"),
        ({"rotary_size": 3}, "rotary_size"),
        ({"rotary_size": 0}, "rotary_size"),
        ({"nope_size": -1}, "nope_size"),
        ({"value_size": 1.5}, "value_size"),
        ({"query_latent": True}, "query_latent"),
        ({"base": 1.0}, "base"),
        ({"norm_eps": 0.0}, "norm_eps"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(options, field):
    with pytest.raises(InvalidValue) as caught:
        configure(installed().mechanisms.get("mla"), options, hidden_size=WIDTH, num_heads=HEADS)
    assert caught.value.metadata["field"] == field


def test_factorised_heads_are_attention_over_what_the_latents_expand_to(build, agrees):
    layer = build("transmla", {"latent": 6}, hidden_size=12, num_heads=3)

    def by_loops(rows):
        weight = {name: part.weight for name, part in layer.named_children()}
        latents, out = rows @ weight["down"].T, []
        for i in range(len(rows)):
            heads = []
            for h in range(3):
                mine = slice(4 * h, 4 * h + 4)
                keys, values = (latents[: i + 1] @ weight[name][mine].T for name in ("key", "value"))
                heads.append((keys @ (weight["query"][mine] @ rows[i]) / 2).softmax(0) @ values)
            out.append(torch.cat(heads))
        return torch.stack(out) @ weight["output"].T

    loops = agrees("transmla", paper="the equations in loops, without positions")
    rows = torch.randn(7, 12, dtype=torch.float64)
    loops.functions(lambda given: layer(given[None])[0], by_loops, rows, tolerance=1e-12)
