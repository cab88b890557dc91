"""Serving a layer that has only `forward`: its inputs are remembered and the whole sequence is run again."""

from __future__ import annotations

import torch
from attn_core import AttentionLayer, LayerState, RaggedBatch
from torch import Tensor

STATE = "inputs"
FIELD = "x"


def replay_step(layer: AttentionLayer, inputs: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
    """What a step of `layer` gives for the new rows `inputs` [tokens, width], as [tokens, width].

    `state` holds the `Paged` state "inputs" with the field "x" [width]. Requests are run one by one: padding
    could change the answer of a mechanism whose computation depends on the length.
    """
    view = state[STATE]
    view.append({FIELD: inputs})
    outputs = []
    for span in batch.spans():
        rows = view.rows([span.request])
        remembered = rows.fields[FIELD] if rows.keep is None else rows.fields[FIELD][rows.keep][None]
        outputs.append(layer.forward(remembered)[0, remembered.shape[1] - (span.stop - span.start) :])
    return torch.cat(outputs)
