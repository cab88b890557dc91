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
"""Number of neighbouring keys that share the random words of one counter."""


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Sets each weight to zero with `probability`, and scales the others so that expected values are unchanged.

    `seed`, 64 bits, and `offset`, 32 bits, such as the number of a call, determine which weights become zero
    (Srivastava et al. 2014). Rows of a batch are counted from `first`. Raises `InvalidValue` for a probability outside
    [0, 1] and numbers of more bits. In a torch.compile graph, which serves many calls, `seed` is a tensor [], int64
    and not negative.
    """

    probability: float
    seed: int | Tensor
    offset: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise InvalidValue.of("dropout.probability", self.probability, "from 0 to 1")
        for name, bits in (("seed", 64), ("offset", 32), ("first", 32)):
            given = getattr(self, name)
            if isinstance(given, int) and not 0 <= given < 1 << bits:
                raise InvalidValue.of(f"dropout.{name}", given, f"a whole number of {bits} bits")

    @property
    def threshold(self) -> int:
        """A weight is dropped if its random word is below this number."""
        return min(WORD, round(self.probability * (WORD + 1)))

    @property
    def signed_seed(self) -> int | Tensor:
        """The seed as a signed 64-bit number with the same bits; a tensor is returned as it is."""
        return self.seed - (1 << 64) * (self.seed >> 63) if isinstance(self.seed, int) else self.seed

    @property
    def scale(self) -> float:
        """The factor by which the kept weights are scaled; 0 where all are dropped."""
        return 1 / (1 - self.probability) if self.probability < 1 else 0.0

    def kept(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Which weights are kept, bool, given `row` (batch times heads plus head) and the indices of queries and keys.

        The arguments are int64 and broadcast. The random word of a pair is number key % 4 of the four that Philox makes
        of the counter key // 4, query, row and offset.
        """
        word = row * 0
        for place, part in enumerate(self.words(row, query, key // TOGETHER)):
            word = word + part * (key % TOGETHER == place)
        return word >= self.threshold

    def words(self, row: Tensor, query: Tensor, four: Tensor) -> list[Tensor]:
        """The random words, int64, of keys 4 `four` to 4 `four` + 3, each of the shape that the arguments broadcast to.

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
    """The upper and the lower 32 bits of words times a 32-bit multiplier, of which the highest bit is set."""
    # The multiplier minus 2^32 is negative, so that signed 64-bit numbers hold all products.
    rest = word * (multiplier - WORD - 1)
    return (rest >> 32) + word, rest & WORD
