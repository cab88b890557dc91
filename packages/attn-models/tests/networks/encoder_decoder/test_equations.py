"""The models against their papers: torch's own modules with the same weights, and loops over the printed equations."""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from torch import nn

BASE = {"vocab_size": 13, "max_seq_len": 10, "max_encoder_len": 10, "hidden_size": 6}


def build(name, **values):
    family = installed().models.get(name)
    torch.manual_seed(0)
    model = family.build(family.configure(BASE | values)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


SOURCE = torch.tensor([3, 1, 4, 1, 5])
TOKENS = torch.tensor([9, 2, 6, 5])


@pytest.mark.parametrize("reverse", [False, True])
def test_the_bottleneck_is_torchs_lstm_twice(reverse):
    model = build("bottleneck", embedding=4, num_layers=2, reverse_source=reverse)
    read, write = nn.LSTM(4, 6, 2).double(), nn.LSTM(4, 6, 2).double()
    read.load_state_dict(model.encoder.state_dict())
    write.load_state_dict(model.decoder.state_dict())
    order = SOURCE.flip(0) if reverse else SOURCE
    _, last = read(model.source_embedding.weight[order])
    hidden, _ = write(model.embedding.weight[TOKENS], last)
    expected = hidden @ model.unembedding.weight.T + model.unembedding.bias
    torch.testing.assert_close(model(TOKENS[None], SOURCE[None])[0], expected, rtol=0, atol=1e-12)


def matrix_of(layer, width):
    """The matrix of a projection; the identity where there is none, cut where the input is narrower."""
    return (
        torch.eye(getattr(layer, "width", width)).double()[:, :width] if not hasattr(layer, "weight") else layer.weight
    )


@pytest.mark.parametrize("projections", ["all", "none"])
def test_rnnsearch_is_the_equations_of_its_appendix(projections):
    model = build("rnnsearch", embedding=4, maxout=5, options={"projections": projections})
    learned = {name for name, _ in model.named_parameters() if name.startswith(("attention", "ask"))}
    assert (learned == {f"attention.score.{part}" for part in ("query_weight", "key_weight", "bias", "vector")}) == (
        projections == "none"
    )
    n, cell, layer = 6, model.cell, model.attention
    forward, backward = nn.GRUCell(4, n).double(), nn.GRUCell(4, n).double()
    for unit, suffix in ((forward, "l0"), (backward, "l0_reverse")):
        weights = {name: getattr(model.encoder, f"{name}_{suffix}") for name, _ in unit.named_parameters()}
        unit.load_state_dict(weights)
    words = model.source_embedding.weight[SOURCE]
    ahead, back = [torch.zeros(n).double()], [torch.zeros(n).double()]
    for word in words:
        ahead.append(forward(word[None], ahead[-1][None])[0])
    for word in words.flip(0):
        back.append(backward(word[None], back[-1][None])[0])
    annotations = [torch.cat([a, b]) for a, b in zip(ahead[1:], back[:0:-1], strict=True)]
    state = torch.tanh(model.begin.weight @ back[-1] + model.begin.bias)
    parts = layer.score.named()
    ask, *matrices = [matrix_of(model.ask, n)] + [
        matrix_of(part, 2 * n) for part in (layer.query, layer.key, layer.value, layer.output)
    ]
    of_query, of_key, of_value, out = matrices
    found = []
    for token in TOKENS:
        word = model.embedding.weight[token]
        query = of_query @ ask @ state @ parts["query_weight"][0]
        energy = [
            torch.tanh(query + of_key @ h @ parts["key_weight"][0] + parts["bias"][0]) @ parts["vector"][0]
            for h in annotations
        ]
        alpha = torch.stack(energy).softmax(0)
        seen = sum(a * (of_value @ h) for a, h in zip(alpha, annotations, strict=True))
        context = out @ seen
        pairs = model.readout.weight @ torch.cat([state, word, context]) + model.readout.bias
        found.append(model.unembedding.weight @ torch.stack([pairs[0::2], pairs[1::2]]).amax(0))
        shown = cell.inward.weight @ word + cell.inward.bias + cell.shown.weight @ context
        update = torch.sigmoid(shown[:n] + cell.gates.weight[:n] @ state)
        reset = torch.sigmoid(shown[n : 2 * n] + cell.gates.weight[n:] @ state)
        proposed = torch.tanh(shown[2 * n :] + cell.candidate.weight @ (reset * state))
        state = (1 - update) * state + update * proposed
    torch.testing.assert_close(model(TOKENS[None], SOURCE[None])[0], torch.stack(found), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("mechanism", "options", "feeds"),
    [
        ("luong", {"score": "general"}, True),
        ("luong", {"score": "general", "projections": "none"}, True),
        ("local_m", {"score": "dot", "radius": 1}, False),
        ("local_m", {"score": "dot", "radius": 1, "projections": "none"}, False),
    ],
)
def test_luong_is_the_equations_of_its_section_3(mechanism, options, feeds):
    model = build("luong", embedding=4, mechanism=mechanism, options=options, input_feeding=feeds, reverse_source=False)
    layer = model.attention
    read, write = nn.LSTMCell(4, 6).double(), nn.LSTMCell(10 if feeds else 4, 6).double()
    for unit, stack in ((read, model.encoder), (write, model.decoder)):
        unit.load_state_dict({name: getattr(stack, f"{name}_l0") for name, _ in unit.named_parameters()})
    held, states = None, []
    for word in model.source_embedding.weight[SOURCE]:
        held = read(word[None], held)
        states.append(held[0][0])
    matrix = layer.score.named()["weight"][0] if options["score"] == "general" else torch.eye(6).double()
    of_query, of_key, of_value, out = (
        matrix_of(part, 6) for part in (layer.query, layer.key, layer.value, layer.output)
    )
    fed, found = torch.zeros(6).double(), []
    for t, token in enumerate(TOKENS):
        word = model.embedding.weight[token]
        held = write(torch.cat([word, fed])[None] if feeds else word[None], held)
        hidden = held[0][0]
        near = [s for s in range(len(states)) if mechanism == "luong" or abs(s - t) <= options["radius"]]
        scores = [(of_query @ hidden) @ matrix @ (of_key @ states[s]) for s in near]
        alpha = torch.stack(scores).softmax(0)
        context = out @ sum(a * (of_value @ states[s]) for a, s in zip(alpha, near, strict=True))
        fed = torch.tanh(model.joined.weight @ torch.cat([context, hidden]))
        found.append(model.unembedding.weight @ fed)
    torch.testing.assert_close(model(TOKENS[None], SOURCE[None])[0], torch.stack(found), rtol=0, atol=1e-12)


@pytest.mark.parametrize("place", ["post", "pre"])
def test_the_transformer_is_torchs_own(place):
    model = build("transformer", num_layers=2, num_heads=2, intermediate_size=9, norm_place=place)
    torchs = nn.Transformer(6, 2, 2, 2, 9, 0.0, batch_first=True, norm_first=place == "pre").double().eval()
    if place == "post":
        torchs.encoder.norm = torchs.decoder.norm = None
    else:
        torchs.encoder.norm.load_state_dict(model.encoder_norm.state_dict())
        torchs.decoder.norm.load_state_dict(model.decoder_norm.state_dict())
    for ours, theirs in zip(model.encoder, torchs.encoder.layers, strict=True):
        copy_attention(ours.attention, theirs.self_attn)
        copy_rest(theirs, ours.feed_forward, [ours.around_attention.norm, ours.around_feed_forward.norm])
    for ours, theirs in zip(model.decoder, torchs.decoder.layers, strict=True):
        copy_attention(ours.attention, theirs.self_attn)
        copy_attention(ours.cross, theirs.multihead_attn)
        norms = [ours.around_attention.norm, ours.around_cross.norm, ours.around_feed_forward.norm]
        copy_rest(theirs, ours.feed_forward, norms)
    source, tokens = SOURCE.expand(2, 5), TOKENS.expand(2, 4)
    key_padding_mask = torch.arange(5) < torch.tensor([5, 3])[:, None]
    hidden = torchs(
        model._embed(source, torch.arange(5)),
        model._embed(tokens, torch.arange(4)),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64),
        src_key_padding_mask=~key_padding_mask,
        memory_key_padding_mask=~key_padding_mask,
    )
    expected = hidden @ model.embedding.weight.T
    torch.testing.assert_close(model(tokens, source, key_padding_mask), expected, rtol=0, atol=1e-10)


def copy_attention(ours, theirs):
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.zero_()
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.zero_()


def copy_rest(theirs, feed_forward, norms):
    theirs.linear1.load_state_dict(feed_forward.up.state_dict())
    theirs.linear2.load_state_dict(feed_forward.down.state_dict())
    for place, norm in enumerate(norms, 1):
        getattr(theirs, f"norm{place}").load_state_dict(norm.state_dict())


@pytest.mark.parametrize(("width", "heads", "published"), [(512, 8, 65e6), (1024, 16, 213e6)])
def test_cl_28_base_and_big_have_the_weights_of_their_equations_near_the_published_number(width, heads, published):
    sizes = {
        "vocab_size": 37_000,
        "max_seq_len": 512,
        "max_encoder_len": 512,
        "hidden_size": width,
        "intermediate_size": 4 * width,
    }
    family = installed().models.get("transformer")
    with torch.device("meta"):
        model = family.build(family.configure(sizes | {"num_layers": 6, "num_heads": heads}))
    count = sum(parameter.numel() for parameter in model.parameters())
    # Matrices of 12 and 16 D² weights in blocks of encoder and decoder; biases of the feed-forward, 5 D; norms, 2 D.
    blocks = 6 * (12 + 16) * width**2 + 6 * ((5 + 2 * 2) + (5 + 3 * 2)) * width
    assert count == 37_000 * width + blocks
    assert count != published
    assert abs(count / published - 1) < 0.04
