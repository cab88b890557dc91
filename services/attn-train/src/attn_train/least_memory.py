"""Lower bounds of a job's memory, by formula from its configuration, before anything is built."""

from __future__ import annotations

from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.decoder import GATED, DecoderConfig
from attn_schema.training import TrainingConfig

from attn_train.data.load import MASKED, TEXT, data_kind_of

ID_BYTES = 16
"""Bytes of a token of a batch: its id and its target, in int64."""
ACTIVATION_BYTES = 2
"""Bytes of an element of the residual stream, which each block keeps for the backward pass, in 16 bits or more."""
MAX_ALL_EXPERTS = 2**15
"""Maximum number of experts of all layers together: each is built as a module of its own."""


def require_few_experts(made: Any) -> None:
    """Raise `InvalidValue` for a decoder with more than `MAX_ALL_EXPERTS` experts in all layers together."""
    if not isinstance(made, DecoderConfig):
        return
    count = (made.num_experts or 0) * sum(made.is_sparse(layer) for layer in range(made.num_layers))
    if count > MAX_ALL_EXPERTS:
        given = f"{made.num_experts}, which makes {count} in {made.num_layers} layers"
        raise InvalidValue.of("config.model.num_experts", given, f"at most {MAX_ALL_EXPERTS} in all layers")


def least_parameters(made: Any) -> int:
    """Return the parameters of a decoder outside of its attention, norms and biases; 0 for other models.

    They are those of embeddings, learned positions, the output layer, feed-forwards and routers.
    """
    if not isinstance(made, DecoderConfig):
        return 0
    matrices = 0 if made.feed_forward == "none" else 3 if made.feed_forward in GATED else 2
    count = made.vocab_size * made.hidden_size * (1 if made.tie_word_embeddings else 2)
    if made.positions == "learned":
        count += (made.max_seq_len + made.position_offset) * made.hidden_size
    for layer in range(made.num_layers):
        inner = made.inner_width
        if made.num_experts is not None and made.is_sparse(layer):
            inner = (made.num_experts + (made.n_shared_experts or 0)) * made.expert_width
            count += made.num_experts * made.hidden_size
        count += matrices * made.hidden_size * inner
    return count


def least_batch_bytes(config: TrainingConfig) -> int:
    """Return the bytes that a worker at least needs for the batches of a step on texts; 0 for other data.

    Every worker draws the ids of all batches of a step, and computes its part of one batch at a time, for which each
    block keeps its input.
    """
    model, optimizer = config.model, config.optimizer
    if data_kind_of(model) not in (TEXT, MASKED) or config.data.format != "text" or model.max_seq_len is None:
        return 0
    tokens = optimizer.batch_size * model.sequence_length
    kept: int = tokens * (model.hidden_size or 1) * (model.num_layers or 1) * ACTIVATION_BYTES // config.workers
    return optimizer.gradient_accumulation_steps * tokens * ID_BYTES + kept
