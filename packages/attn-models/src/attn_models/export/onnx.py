"""Exports a decoder to ONNX through torch.export, with any number of sequences and tokens."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import Incompatible, MissingPackage
from attn_schema.text_files import lines_of

SAMPLE = (2, 5)
"""The shape of the sample tokens [batch, tokens]; neither size is 1, which torch.export would take for a constant."""


def write_onnx(target: Path, model: Any) -> None:
    """Write `model`, a language model without an encoder, as an ONNX file.

    Its input is `tokens` [batch, tokens], int64, its output `logits` [batch, tokens, vocabulary], both of any batch and
    of up to the model's context. Raises `MissingPackage` without onnxscript, `Incompatible` for a forward that
    torch.export or ONNX cannot express, with its reason.
    """
    if find_spec("onnxscript") is None:
        raise MissingPackage.of("onnxscript", "exports to ONNX")
    if getattr(model, "max_encoder_len", None) is not None:
        raise Incompatible("a model with an encoder cannot be exported to ONNX")
    model = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
    for module in model.modules():
        if hasattr(module, "use_kernel"):
            # Other kernels have operators of their own, which ONNX lacks.
            module.use_kernel("plain")
    most = torch.export.Dim("tokens", max=model.max_seq_len)
    sample = torch.zeros(SAMPLE[0], min(SAMPLE[1], model.max_seq_len), dtype=torch.int64)
    try:
        shapes = {"tokens": {0: torch.export.Dim("batch"), 1: most}}
        exported = torch.export.export(model, (sample,), dynamic_shapes=shapes, strict=False)
        program = torch.onnx.export(
            exported, dynamo=True, input_names=["tokens"], output_names=["logits"], verbose=False
        )
    except Exception as error:  # the exporter raises many kinds
        reason = next(filter(str.strip, lines_of(str(error.__cause__ or error))), type(error).__name__)
        raise Incompatible(f"the model cannot be exported to ONNX: {reason}") from error
    sizes = [] if program is None else list(program.model.graph.inputs[0].shape or ())
    if program is None or len(sizes) != 2 or any(isinstance(size, int) for size in sizes):
        raise Incompatible(f"the model cannot be exported to ONNX: its graph is fixed to tokens {sizes}")
    program.save(target)
