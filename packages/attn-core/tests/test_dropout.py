from __future__ import annotations

import math

import pytest

from attn_core.dropout import Dropout, philox
from attn_core.errors import InvalidValue

torch = pytest.importorskip("torch")

ZEROS, ONES = [0, 0, 0, 0], [0xFFFFFFFF] * 4
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
KNOWN = {
    "zeros": (ZEROS, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    "ones": (ONES, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    "digits of pi": (PI, 0x299F31D0A4093822, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_words_are_those_that_the_authors_of_philox_publish(name):
    counter, seed, words = KNOWN[name]
    found = philox([torch.tensor([word]) for word in counter], seed)
    assert [int(word) for word in found] == words


def kept(dropout: Dropout, rows: int = 2, queries: int = 100, keys: int = 101):
    row, query, key = (torch.arange(count) for count in (rows, queries, keys))
    return dropout.kept(row[:, None, None], query[:, None], key)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_as_many_weights_are_dropped_as_asked_within_five_standard_deviations(probability):
    found = kept(Dropout(probability=probability, seed=7))
    deviation = math.sqrt(probability * (1 - probability) / found.numel())
    assert abs(1 - float(found.double().mean()) - probability) <= 5 * deviation
    for axis in range(3):
        others = found.numel() / found.shape[axis]
        means = found.double().movedim(axis, 0).flatten(1).mean(1)
        assert float((means - (1 - probability)).abs().max()) <= 5.5 * math.sqrt(
            probability * (1 - probability) / others
        )


def test_seeds_offsets_and_rows_drop_independently_and_the_same_ones_alike():
    base = Dropout(probability=0.5, seed=3)
    others = [Dropout(probability=0.5, seed=4), Dropout(probability=0.5, seed=3, offset=1)]
    assert torch.equal(kept(base), kept(Dropout(probability=0.5, seed=3)))
    drawn = [kept(base)[0], kept(base)[1], *(kept(other)[0] for other in others)]
    for place, one in enumerate(drawn):
        for other in drawn[place + 1 :]:
            assert abs(float((one == other).double().mean()) - 0.5) <= 5 * 0.5 / math.sqrt(one.numel())


@pytest.mark.parametrize(
    "given", [{"probability": 1.5}, {"probability": -0.1}, {"seed": -1}, {"seed": 1 << 64}, {"offset": 1 << 32}]
)
def test_probabilities_and_numbers_that_do_not_fit_are_refused(given):
    with pytest.raises(InvalidValue, match=rf"^dropout\.{next(iter(given))}"):
        Dropout(**{"probability": 0.1, "seed": 0, **given})
