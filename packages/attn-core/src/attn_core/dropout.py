"""Attention dropout whose mask depends on the seed and the indices of a query-key pair, not on the kernel or its tiles.

Only methods and operators of tensors are used, so that the contract needs no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_core.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

WORD = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
TOGETHER = 4
"""Neighbouring keys that share the words of one counter."""


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Each weight becomes zero with `probability`, and the others grow so that nothing changes on average.

    `seed`, 64 bits, and `offset`, 32 bits, such as the number of a call, fix which (Srivastava et al. 2014). Rows of a
    batch are counted from `first`. Raises `InvalidValue` for a probability outside [0, 1) and numbers of more bits.
    In a graph of torch.compile, which serves many calls, `seed` is a tensor [], int64 and not negative.
    """

    probability: float
    seed: int | Tensor
    offset: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise InvalidValue.of("dropout.probability", self.probability, "from 0 to below 1")
        for name, bits in (("seed", 64), ("offset", 32), ("first", 32)):
            given = getattr(self, name)
            if isinstance(given, int) and not 0 <= given < 1 << bits:
                raise InvalidValue.of(f"dropout.{name}", given, f"a whole number of {bits} bits")

    @property
    def threshold(self) -> int:
        """Words below this drop a weight."""
        return min(WORD, round(self.probability * (WORD + 1)))

    @property
    def signed_seed(self) -> int | Tensor:
        """The seed as int64 holds it: a number with a sign that has its bits; a tensor as it is."""
        return self.seed - (1 << 64) * (self.seed >> 63) if isinstance(self.seed, int) else self.seed

    @property
    def scale(self) -> float:
        """By how much what is left grows."""
        return 1 / (1 - self.probability)

    def kept(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether weights stay, bool; of `row`, batch times heads plus head, and the numbers of queries and of keys.

        These are int64 and broadcast. The word of a pair is number key % 4 of the four of Philox, whose counter is
        key // 4, query, row and offset.
        """
        word = row * 0
        for place, part in enumerate(self.words(row, query, key // TOGETHER)):
            word = word + part * (key % TOGETHER == place)
        return word >= self.threshold

    def words(self, row: Tensor, query: Tensor, four: Tensor) -> list[Tensor]:
        """The words, int64, of keys 4 `four` to 4 `four` + 3, each of the shape that the arguments broadcast to.

        Neighbouring keys share a counter, so a kernel that computes them together does a quarter of the work; see
        `kept`.
        """
        return philox([four, query, row, row * 0 + self.offset], self.seed)


def philox(counter: list[Tensor], seed: int | Tensor) -> list[Tensor]:
    """Four random words of 32 bits, int64, for each counter of four (Philox4x32-10, Salmon et al. 2011)."""
    first, second, third, fourth = counter
    low, high = seed & WORD, seed >> 32
    for _ in range(ROUNDS):
        one, two = product(third, MULTIPLIERS[1]), product(first, MULTIPLIERS[0])
        first, second, third, fourth = one[0] ^ second ^ low, one[1], two[0] ^ fourth ^ high, two[1]
        low, high = (low + WEYL[0]) & WORD, (high + WEYL[1]) & WORD
    return [first, second, third, fourth]


def product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of words times a number of 32 bits, of which the highest is set."""
    # With 2^32 less the number is negative, and 64 bits with a sign hold all products.
    rest = word * (multiplier - WORD - 1)
    return (rest >> 32) + word, rest & WORD
