"""Small draft models."""

from __future__ import annotations

import torch
from attn_core import installed
from attn_core.stores import StoreSize
from attn_engine import DraftModel
from small_models import KINDS, SmallModel

DRAFTS = {name: layers for name, layers in KINDS.items() if name not in ("source", "hybrid")}


def draft_of(model, cache="contiguous", tokens=96 * 8, requests=8):
    store = (
        installed()
        .caches.get(cache)
        .create(model.state_specs(), StoreSize(tokens=tokens, requests=requests, dtype="float64"))
    )
    return DraftModel(model, store, max_num_batched_tokens=64)


def similar(model, layers):
    """A smaller model that shares the embeddings of another, so that it often says the same."""
    torch.manual_seed(3)
    draft = SmallModel(*layers()).double().eval()
    draft.embed, draft.place, draft.head = model.embed, model.place, model.head
    return draft
