"""Sparse masks: the cost of each computed block, and the speed compared with FlexAttention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attention import beside, said_of, timed
from attn_core import Causal, Full, Mask, Window
from attn_core.masks import BigBird, Prefix, Segments, blocks
from cases import Case
from peers import MaskMod, flex
from torch import Tensor

BLOCK = 128
"""The block size, in queries and keys, for counting computed blocks; the same as most tiles."""

DOCUMENTS = (900, 100, 2048, 3000, 500, 1644)


def masks(*, small: bool) -> dict[str, Mask]:
    """The masks over 8192 tokens; the last one is block-sparse."""
    if small:
        return {"window": Window(left=9), "big bird": BigBird(block=16, random=1).of_head(0)}
    return {
        "window 512": Window(left=512),
        "window 1024": Window(left=1024),
        "prefix of 1024": Causal() | Prefix(1024),
        "documents": Causal() & Segments(DOCUMENTS),
        "big bird": BigBird(block=BLOCK, random=3).of_head(0),
    }


KEPT = ("window", "window 512", "window 1024", "big bird")
"""The masks that allow only a small fraction of the pairs."""


def case_of(name: str, mask: Mask, *, small: bool) -> Case:
    """The case of a mask over many tokens."""
    length, size, heads = (64, 16, (2, 2)) if small else (8192, 128, (16, 4))
    return Case(name=name, mask=mask, queries=length, keys=length, sizes=(size, size), heads=heads)


def kept(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """`forward` and `backward` are the time per block of attn's dense attention, divided by that of a sparse mask."""
    dense, block = case_of("full", Full(), small=small), 16 if small else BLOCK
    whole = {"blocks": (dense.queries // block) * (dense.keys // block), **timed(dense, device)}
    yield {"case": dense.name, **whole}
    for name, mask in masks(small=small).items():
        if name in KEPT:
            case = case_of(name, mask, small=small)
            found = {"blocks": blocks(mask, case.queries, case.keys, block).computed, **timed(case, device)}
            way = {way: each(whole, way) / each(found, way) for way in ("forward", "backward")}
            yield {"case": name, "beside": "own dense, by block", **found, **way}


def each(row: dict[str, Any], way: str) -> float:
    """The time per block, in milliseconds."""
    found: float = row[f"{way}_ms"] / row["blocks"]
    return found


def documents(device: str) -> MaskMod:
    """The document mask as written in FlexAttention's own examples, because FlexAttention fails to compile attn's."""
    numbers = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS)).to(device)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 -- FlexAttention's form
        return (query >= key) & (numbers[query] == numbers[key])

    return seen


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The times of all masks, each compared with compiled FlexAttention."""
    for name, mask in {**masks(small=small), "causal": Causal()}.items():
        case = case_of(name, mask, small=small)
        yield {"case": name, **timed(case, device)}
        try:
            other = flex(case, device, documents(device) if name == "documents" else None)
        except Exception as error:  # noqa: BLE001 -- whatever fails in a peer costs this row alone
            yield {"case": name, "beside": "flex", "refused": said_of(error)}
            continue
        yield {"case": name, **beside("flex", case, other, device)}
