"""Ready-made token ids with masks, as transformers and TRL write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Ready-made token ids, and for each whether it is a target."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


MASKS = ("attention_mask", "completion_mask", "assistant_masks")
PACKED = ("seq_lengths", "position_ids")


def token_rows(values: Mapping[str, Any]) -> list[TokenRow]:
    """Token ids as transformers and TRL have them: `labels` are the ids themselves, or -100 where nothing is learned.

    Tokens at both ends of which the attention mask is 0 are padding. A row of several packed samples, by their lengths
    or by positions that begin anew, is as many rows.
    """
    columns = {name: values[name] for name in ("input_ids", "labels", *MASKS, *PACKED) if values.get(name) is not None}
    ids = columns["input_ids"]
    for name, column in columns.items():
        if not isinstance(column, list) or not all(type(number) is int for number in column):
            raise InvalidValue.of(name, column, "a list of integers")
        if len(column) != len(ids) and name != "seq_lengths":
            raise InvalidValue.of(name, f"{len(column)} numbers", f"{len(ids)}, as many as input_ids")
        if name in MASKS and not {0, 1}.issuperset(column):
            raise InvalidValue.of(name, column, "0 or 1 for each token")
    for place, (token, label) in enumerate(zip(ids, columns.get("labels", ids), strict=True)):
        if label not in (token, IGNORED):
            raise InvalidValue.of(f"labels[{place}]", label, f"{token}, the id at this place, or {IGNORED}")
    real = columns.get("attention_mask", [1] * len(ids))
    first, last = (real.index(1), len(real) - real[::-1].index(1)) if 1 in real else (0, 0)
    if 0 in real[first:last]:
        raise InvalidValue.of("attention_mask", real, "zeros for padding at the ends only")
    marks = [columns.get(name, [1] * len(ids)) for name in MASKS[1:]]
    marks.append([int(label != IGNORED) for label in columns.get("labels", ids)])
    learned = tuple(all(each) for each in zip(*marks, strict=True))
    lengths = columns.get("seq_lengths", [])
    if lengths and (sum(lengths) != len(ids) or min(lengths) < 1):
        raise InvalidValue.of("seq_lengths", lengths, f"lengths above 0 whose sum is {len(ids)}")
    begins = [place for place in range(first + 1, last) if columns.get("position_ids", ids)[place] == 0]
    begins = list(accumulate(lengths))[:-1] if lengths else begins if "position_ids" in columns else []
    cuts = [first, *(place for place in begins if first < place < last), last]
    return [TokenRow(tuple(ids[start:stop]), learned[start:stop]) for start, stop in pairwise(cuts)]
