import math

import pytest
import torch
from attn_core import configure, installed, state_bytes
from attn_core.errors import InvalidValue
from attn_variants.mechanisms.ntm_layer import by_content, interpolated, sharpened, shifted

F64 = torch.float64


def of(*numbers):
    return torch.tensor(numbers, dtype=F64)


@pytest.mark.parametrize(
    ("strength", "expected"), [(1.0, [0.50648, 0.18632, 0.30720]), (5.0, [0.91842, 0.00619, 0.07539])]
)
def test_content_is_found_by_its_angle(strength, expected):
    memory = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]], dtype=F64)
    weights = by_content(of(1, 0, 1)[None], memory, of(strength))
    assert torch.allclose(weights[0], of(*expected), rtol=0, atol=1e-5)


def test_content_equals_torchs_cosine_and_a_zero_vector_is_like_nothing(agrees):
    key, memory = torch.randn(2, 3, 5, dtype=F64), torch.randn(2, 7, 5, dtype=F64)
    strength = torch.rand(2, 3, dtype=F64) * 9
    cosines = torch.cosine_similarity(key[:, :, None], memory[:, None], dim=-1)
    expected = (strength[..., None] * cosines).softmax(-1)
    agrees("ntm", package="torch cosine_similarity").outputs(by_content(key, memory, strength), expected, 1e-7)
    zero = torch.zeros(1, 5, dtype=F64, requires_grad=True)
    weights = by_content(zero, memory[0], of(3.0))
    assert torch.allclose(weights, torch.full((1, 7), 1 / 7, dtype=F64))
    weights[0, 0].backward()
    assert zero.grad.isfinite().all()


def test_a_shift_moves_weight_around_the_end_and_a_power_sharpens_it():
    moved = shifted(of(0.1, 0.7, 0.2), of(0.0, 0.1, 0.9))
    assert torch.allclose(moved, of(0.19, 0.16, 0.65), rtol=0, atol=1e-15)
    assert torch.allclose(sharpened(moved, of(2.0)[0]), of(0.07456, 0.05287, 0.87257), rtol=0, atol=1e-5)
    assert torch.equal(shifted(of(1, 0, 0, 0), of(0, 0, 1)), of(0, 1, 0, 0))
    assert torch.equal(shifted(of(1, 0, 0, 0), of(1, 0, 0)), of(0, 0, 0, 1))


def test_a_closed_gate_stays_where_it_was():
    before, content = of(0.2, 0.8)[None], of(0.5, 0.5)[None]
    assert torch.equal(interpolated(content, before, of(0.0)), before)
    assert torch.equal(interpolated(content, before, of(1.0)), content)


def test_weights_too_small_for_their_power_stay_numbers():
    weights = of(1.0, 0.0, 1e-300).requires_grad_()
    sharp = sharpened(weights, torch.tensor(50.0, dtype=F64))
    sharp[1].backward()
    assert sharp.isfinite().all()
    assert weights.grad.isfinite().all()


def by_loops(layer, rows):
    """The paper's sections 3.1 to 3.3 for rows [token, width]: one head, one slot, one element at a time."""
    size, slots, look = layer.size, layer.slots, sum(layer.look)
    memory = [list(row) for row in layer.start.tolist()]
    looks = {which: [[1.0] + [0.0] * (slots - 1) for _ in range(layer.heads)] for which in ("read", "write")}
    found, out = [[0.0] * size for _ in range(layer.heads)], []

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    def aim(said, before):
        key, (beta, gate), shifts, gamma = said[:size], said[size : size + 2], said[size + 2 : -1], said[-1]
        beta, gamma, gate = math.log1p(math.exp(beta)), 1 + math.log1p(math.exp(gamma)), sigmoid(gate)
        norms = [math.hypot(*row) * math.hypot(*key) + 1e-8 for row in memory]
        raw = [
            math.exp(beta * sum(a * b for a, b in zip(key, row, strict=True)) / n)
            for row, n in zip(memory, norms, strict=False)
        ]
        mixed = [gate * r / sum(raw) + (1 - gate) * b for r, b in zip(raw, before, strict=True)]
        chances = [math.exp(s) / sum(map(math.exp, shifts)) for s in shifts]
        reach = len(shifts) // 2
        moved = [
            sum(chances[o + reach] * mixed[(i - o) % slots] for o in range(-reach, reach + 1)) for i in range(slots)
        ]
        sharp = [m**gamma for m in moved]
        return [s / sum(sharp) for s in sharp]

    for row in rows:
        seen = torch.cat([row, torch.tensor(found, dtype=F64).flatten()])
        control = torch.tanh(layer.controller.weight @ seen + layer.controller.bias)
        said = (layer.interface.weight @ control + layer.interface.bias).view(layer.heads, -1).tolist()
        looks["write"] = [
            aim(words[look : 2 * look], before) for words, before in zip(said, looks["write"], strict=True)
        ]
        written = [list(slot) for slot in memory]
        for i in range(slots):
            for j in range(size):
                for head, words in enumerate(said):
                    written[i][j] *= 1 - looks["write"][head][i] * sigmoid(words[2 * look + j])
                for head, words in enumerate(said):
                    written[i][j] += looks["write"][head][i] * words[2 * look + size + j]
        memory = written
        looks["read"] = [aim(words[:look], before) for words, before in zip(said, looks["read"], strict=True)]
        found = [
            [sum(w * slot[j] for w, slot in zip(weights, memory, strict=True)) for j in range(size)]
            for weights in looks["read"]
        ]
        out.append(torch.cat([control, torch.tensor(found, dtype=F64).flatten()]))
    return torch.stack(out) @ layer.output.weight.T


@pytest.mark.parametrize(("heads", "slots", "shift"), [(1, 5, 1), (2, 6, 2), (2, 1, 0)])
def test_it_equals_a_loop_over_slots_and_elements(build, agrees, heads, slots, shift):
    layer = build("ntm", {"slots": slots, "shift": shift}, hidden_size=6, num_heads=heads)
    rows = torch.randn(5, 6, dtype=F64)
    with torch.no_grad():
        loops = agrees("ntm", paper="sections 3.1 to 3.3 in loops over numbers")
        loops.outputs(layer(rows[None])[0], by_loops(layer, rows), 1e-12)


def test_gradients_equal_finite_differences_through_several_writes(build):
    layer = build("ntm", {"slots": 4}, hidden_size=3, num_heads=1)
    rows = torch.randn(1, 5, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, rows)


def test_the_state_weighs_the_same_at_any_length():
    ntm = installed().mechanisms.get("ntm")
    specs = ntm.state(configure(ntm, {"slots": 128}, hidden_size=32, num_heads=4))
    assert state_bytes(specs, tokens=10, dtype="bfloat16") == (128 * 8 + 2 * 4 * 128 + 4 * 8) * 4
    assert state_bytes(specs, tokens=9999, dtype="bfloat16") == state_bytes(specs, tokens=1, dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "message"), [({"slots": 0}, "slots: 0"), ({"slots": 2}, "shift: 1"), ({"shift": -1}, "shift: -1")]
)
def test_a_memory_too_small_is_refused_by_name(options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(installed().mechanisms.get("ntm"), options, hidden_size=8)


@pytest.mark.oracle
def test_content_is_found_as_in_the_package_dnc(agrees):
    from dnc.memory import Memory

    theirs = Memory(input_size=6, mem_size=7, cell_size=5, read_heads=3).content_weightings
    memory, key, strength = (
        torch.randn(2, 7, 5, dtype=F64),
        torch.randn(2, 3, 5, dtype=F64),
        torch.rand(2, 3, dtype=F64),
    )
    oracle = agrees("ntm", package="dnc content_weightings")
    # Theirs adds 1e-6 to the product of the norms.
    oracle.functions(lambda m, k, s: by_content(k, m, s), theirs, memory, key, strength, tolerance=1e-5)


def test_the_gradient_of_addressing_equals_that_through_the_definition_in_loops(agrees):
    def by_definition(key, memory, strength, gate, shifts, power, before):
        norms = [(row @ row).sqrt() * (key @ key).sqrt() + 1e-8 for row in memory]
        raw = [torch.exp(strength * (row @ key) / norm) for row, norm in zip(memory, norms, strict=True)]
        mixed = [gate * one / sum(raw) + (1 - gate) * old for one, old in zip(raw, before, strict=True)]
        moved = [sum(shifts[o + 1] * mixed[(i - o) % 4] for o in (-1, 0, 1)) for i in range(4)]
        sharp = [one**power for one in moved]
        return torch.stack([one / sum(sharp) for one in sharp])

    def ours(key, memory, strength, gate, shifts, power, before):
        content = by_content(key[None], memory, strength[None])
        return sharpened(shifted(interpolated(content, before[None], gate[None]), shifts[None]), power[None])[0]

    shares = torch.rand(3, dtype=F64).softmax(-1), torch.rand(4, dtype=F64).softmax(-1)
    given = (
        torch.randn(5, dtype=F64),
        torch.randn(4, 5, dtype=F64),
        of(2.5)[0],
        of(0.7)[0],
        shares[0],
        of(1.8)[0],
        shares[1],
    )
    agrees("ntm", paper="equations 5 to 9, slot by slot").functions(ours, by_definition, *given, tolerance=1e-7)
