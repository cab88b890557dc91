"""Every mechanism that is declared as a spec, against the definition of its parts, head by head in float64."""

import dataclasses

import pytest
import torch
from attn_core import Capability, configure, installed
from attn_testing import oracle

WIDTH, HEADS, TOKENS, SOURCE = 16, 4, 11, 7
OPTIONS = {
    "attention_sinks": {"sinks": 2, "window": 4},
    "bigbird": {"block": 1, "random": 1},
    "block_local": {"block": 3},
    "chunk_ring": {"chunk": 3},
    "chunked": {"chunk": 4},
    "dependency": {"parse": (1, -1, 4, 4, 1, 4), "clip": 3},
    "dilated_window": {"window": 3, "dilations": (1, 2)},
    "entmax": {"alpha": 1.3},
    "fixed": {"block": 4, "summaries": 2},
    "local_m": {"radius": 2},
    "local_p": {"radius": 2},
    "neighborhood": {"size": 3},
    "relative_bias": {"clip": 3},
    "shaw": {"clip": 2},
    "sliding_window": {"window": 3},
    "soft_cap": {"cap": 1.5},
    "strided": {"stride": 3},
    "t5_bias": {"buckets": 8, "max_distance": 12},
}
"""What brings out a mechanism's character in so few tokens."""


BESIDES = {"dependency_depth", "disentangled"}
"""Those that change inputs or add to scores beside the spec; tests of their own in `positions` have their loops."""


def declared():
    """Names of those whose spec says all there is to compute."""
    found = installed().mechanisms
    for name in found.names():
        mechanism = found.get(name)
        config = configure(mechanism, hidden_size=WIDTH, num_heads=HEADS, causal=mechanism.can(Capability.CAUSAL))
        spec = mechanism.spec(config) if found.owner(name) == "attn-variants" else None
        if spec is not None and mechanism.inner(config) is None and name not in BESIDES:
            yield name


def normed(layer, rows, gain):
    if layer.spec.norm is None:
        return rows
    squares = rows.square().mean(-1, keepdim=True) * (rows.shape[-1] if layer.spec.norm.kind == "qk_l2_norm" else 1)
    return rows / (squares + layer.spec.norm.eps).sqrt() * layer.norm.named().get(gain, 1.0)


def turned(rotary, rows):
    """Rows [batch, tokens, heads, size]; halves of a head are the real and the imaginary parts of complex numbers."""
    if rotary is None:
        return rows
    real, imaginary = rows.chunk(2, dim=-1)
    half = real.shape[-1]
    angles = torch.arange(rows.shape[1])[:, None, None] * rotary.base ** (-torch.arange(half, dtype=rows.dtype) / half)
    rotated = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag], dim=-1)


def heads_of(linear, rows):
    return (rows @ linear.weight.T).view(*rows.shape[:2], -1, WIDTH // HEADS)


def by_definition(layer, rows, source=None):
    memory = rows if source is None else source
    query, fields = normed(layer, heads_of(layer.query, rows), "query_gain"), {"value": heads_of(layer.value, memory)}
    if layer.spec.score.reads_keys:
        key = normed(layer, heads_of(layer.key, memory), "key_gain")
        fields["key"] = turned(layer.spec.rotary, key)
    places = None if source is None else torch.arange(rows.shape[1])[None]
    operands = layer.operands(turned(layer.spec.rotary, query), fields, positions=(places, None))
    if layer.spec.score.projects_keys:  # these keys are not projected yet
        parameters = {**operands.parameters, "score.key_weight": layer.score.key_weight}
        operands = dataclasses.replace(operands, parameters=parameters)
    return oracle.attend(layer.spec, operands).flatten(-2) @ layer.output.weight.T


@pytest.mark.parametrize("name", list(declared()))
def test_outputs_and_gradients_are_those_of_the_definition(build, agrees, name):
    mechanism = installed().mechanisms.get(name)
    layer = build(name, OPTIONS.get(name), hidden_size=WIDTH, num_heads=HEADS, causal=mechanism.can(Capability.CAUSAL))
    with torch.no_grad():
        for weight in layer.parameters():  # nothing that starts at zero or one stays there
            weight.add_(0.3 * torch.randn_like(weight))
    given = [torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)]
    if layer.spec.cross:
        given.append(torch.randn(2, SOURCE, WIDTH, dtype=torch.float64))
    definition = agrees(name, parts="the definition of its parts, pair by pair")
    definition.functions(layer, lambda *rows: by_definition(layer, *rows), *given, tolerance=1e-11)
