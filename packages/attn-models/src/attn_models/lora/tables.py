"""Changes of the tables that have a row for each token: the embedding, and the unembedding, which may be tied to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.decoder.decoder import Decoder
from attn_models.lora.layer import LoraLayer
from attn_models.lora.peft_config import AdapterConfig
from attn_models.lora.sites import dense_weight, is_named

EMBEDDING, UNEMBEDDING = "embedding", "unembedding"
TABLES = (EMBEDDING, UNEMBEDDING)


class TableRows(nn.Module):
    """Rows [ids, width] in place of those of the tokens `ids` of a table [vocab_size, width], or of all without ids."""

    ids: Tensor | None

    def __init__(self, rows: Tensor, ids: Sequence[int] | None = None) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)
        self.register_buffer("ids", None if ids is None else torch.tensor(ids), persistent=False)

    def over(self, table: Tensor) -> Tensor:
        """The changed table [vocab_size, width]."""
        rows = self.rows.to(table.dtype)
        return rows if self.ids is None else table.index_copy(0, self.ids, rows)


TableChange = TableRows | LoraLayer
"""A change of a table; that of a `LoraLayer` has A [rank, width] and B [vocab_size, rank]."""


def fits(change: TableChange, table: Tensor) -> bool:
    """Whether a change is one of a table [vocab_size, width]."""
    vocab_size, width = table.shape
    if isinstance(change, LoraLayer):
        return (len(change.b), change.a.shape[1]) == (vocab_size, width)
    count = vocab_size if change.ids is None else len(change.ids)
    known = change.ids is None or bool((change.ids < vocab_size).all())
    return change.rows.shape == (count, width) and known


def is_tied(model: Any) -> bool:
    """Whether the unembedding of a decoder is its embedding."""
    return bool(model.config.tie_word_embeddings)


def table_of(model: Any, name: str) -> Tensor:
    """The table [vocab_size, width] of a decoder, in float32 if it is packed."""
    layer = model.embedding if name == EMBEDDING or is_tied(model) else model.unembedding
    if layer is None:
        return dense_weight(model.head, model.config.hidden_size)
    if isinstance(layer, nn.Embedding | nn.Linear):
        return layer.weight.detach()
    # `forward` instead of a call, which would run the hook that reads this.
    return cast("Tensor", layer.forward(torch.arange(model.config.vocab_size))).float()


def fresh_tables(
    model: Any, config: AdapterConfig, modules: Mapping[str, Sequence[str]], targets: Sequence[str]
) -> dict[str, TableChange]:
    """The changes of tables that a config and the names of target modules ask for, which change nothing yet; those of
    tied tables are one.

    Raises `InvalidValue` for names in `modules_to_save` that are no tables, for a table that is changed in two ways,
    and for DoRA of a table.
    """
    known = TABLES if isinstance(model, Decoder) else ()
    for name in config.modules_to_save:
        if not any(is_named(table, modules, [name]) for table in known):
            allowed = ", ".join(modules.get(table, (table,))[-1] for table in known) or "none for this model"
            raise InvalidValue.of("modules_to_save", name, allowed)
    if config.trainable_token_indices and not known:
        raise InvalidValue.of("trainable_token_indices", config.trainable_token_indices, "none for this model")
    found: dict[str, TableChange] = {}
    for name in known:
        ways = list(_changes(model, name, config, modules, targets))
        if name in found or not ways:
            continue
        if len(ways) > 1:
            allowed = "one of modules_to_save, trainable_token_indices and lora_target_modules"
            raise InvalidValue.of("modules_to_save", f"{name} changed in {len(ways)} ways", allowed)
        found |= dict.fromkeys(TABLES if is_tied(model) else (name,), ways[0])
    return {name: found[name] for name in TABLES if name in found}


def _changes(
    model: Any, name: str, config: AdapterConfig, modules: Mapping[str, Sequence[str]], targets: Sequence[str]
) -> Iterator[TableChange]:
    vocab_size, width = model.config.vocab_size, model.config.hidden_size
    if is_named(name, modules, config.modules_to_save):
        yield TableRows(table_of(model, name).clone().float())
    if config.trainable_token_indices and (name == EMBEDDING or is_tied(model)):
        ids = sorted(set(config.trainable_token_indices))
        if not 0 <= ids[0] <= ids[-1] < vocab_size:
            raise InvalidValue.of("trainable_token_indices", ids, f"0 to {vocab_size - 1}")
        yield TableRows(table_of(model, name)[ids].clone().float(), ids)
    if is_named(name, modules, targets):
        if config.use_dora:
            raise InvalidValue.of("use_dora", f"true for {name}", "false for tables of tokens")
        own = modules.get(name, (name,))[-1]
        a = torch.empty(config.rank(own), width)
        nn.init.uniform_(a, -1 / math.sqrt(width), 1 / math.sqrt(width))
        yield LoraLayer(a, torch.zeros(vocab_size, len(a)), config.scaling(own))
