"""What do FP8 weights, with or without FP8 inputs, cost in quality? Perplexity on real text, beside bfloat16 and int8.

    python benchmarks/fp8_weights_cpu.py MODEL_FOLDER TEXT_FILE --out benchmarks/results/fp8-weights-cpu.json

The texts of the results are sentences of Universal Dependencies' English Web Treebank, one per line, and Bible verses:
`zcat en_ewt-test.conllu.gz | sed -n 's/^# text = //p' > ewt-test.txt`, `zcat bible-en-es.tsv.gz | cut -f2 > bible.txt`.
The roundings are those of the GPU kernels, emulated in plain torch: weights and inputs of linear layers are rounded,
and everything else, accumulation included, is float32. `weights` is the format of the blocks' weights, `inputs` the
rounding of their inputs, `head` both for the unembedding. Each token's log probability is compared with that of the
first row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_kernels_triton.products import int8_linear
from attn_kernels_triton.products_fp8 import GROUP, rounded
from attn_models.loading import load_model
from attn_models.quantization.modules import linear_of
from report import write_report
from torch import Tensor, nn

WINDOW = 1024
"""The window length: each token is predicted from the tokens before it in its window."""
Rounding = Callable[[Tensor], Tensor]


def kept(numbers: Tensor) -> Tensor:
    """No rounding."""
    return numbers


def bfloat16(numbers: Tensor) -> Tensor:
    """Numbers rounded to bfloat16."""
    return numbers.to(torch.bfloat16).float()


def int8(weight: Tensor) -> Tensor:
    """Weights [outputs, inputs] rounded to int8 with one scale for each output."""
    held = int8_linear(weight, None).held
    return held.data[:, : held.inputs].float() * held.steps[:, None]


def fp8(rows: Tensor) -> Tensor:
    """Rows [rows, inputs] rounded to e4m3 with one scale for each row: an output (weights) or a token (inputs)."""
    codes, scales = rounded(rows)
    return codes.float() * scales


def fp8_groups(rows: Tensor) -> Tensor:
    """Inputs [tokens, inputs] rounded to e4m3 with one scale for each 128 elements of a token."""
    codes, scales = rounded(rows, GROUP)
    return codes.float() * scales.repeat_interleave(GROUP, 1)[:, : codes.shape[1]]


def fp8_blocks(weight: Tensor) -> Tensor:
    """Weights rounded to e4m3 with one scale for each block of 128 x 128 (arXiv 2412.19437, section 3.3.2)."""
    outputs, inputs = weight.shape
    whole = nn.functional.pad(weight, (0, -inputs % GROUP, 0, -outputs % GROUP))
    blocks = whole.view(len(whole) // GROUP, GROUP, -1, GROUP).transpose(1, 2)
    found = fp8(blocks.reshape(-1, GROUP * GROUP)).view_as(blocks)
    return found.transpose(1, 2).reshape_as(whole)[:outputs, :inputs]


def fp8_whole(weight: Tensor) -> Tensor:
    """Weights rounded to e4m3 with one scale for the whole tensor."""
    return fp8(weight.view(1, -1)).view_as(weight)


@dataclass(frozen=True)
class Way:
    """The roundings of weights and inputs, for the linear layers of blocks and for the unembedding."""

    weights: Rounding
    inputs: Rounding
    head_weights: Rounding
    head_inputs: Rounding


WAYS = (
    Way(kept, kept, kept, kept),
    Way(bfloat16, bfloat16, bfloat16, bfloat16),
    Way(int8, bfloat16, int8, bfloat16),
    Way(fp8, bfloat16, bfloat16, bfloat16),
    Way(fp8, bfloat16, int8, bfloat16),
    Way(fp8, bfloat16, fp8, bfloat16),
    Way(fp8, fp8, bfloat16, bfloat16),
    Way(fp8, fp8, int8, bfloat16),
    Way(fp8, fp8, fp8, bfloat16),
    Way(fp8, fp8, fp8, fp8),
    Way(fp8_whole, fp8, int8, bfloat16),
    Way(fp8_blocks, bfloat16, int8, bfloat16),
    Way(fp8_blocks, fp8_groups, int8, bfloat16),
)


def rounding(layer: nn.Linear, weights: Rounding, inputs: Rounding) -> nn.Linear:
    """A copy of the layer with rounded weights, which also rounds its inputs [..., inputs] at every call."""
    found = linear_of(weights(layer.weight.detach().float()), layer.bias)

    def rounded_rows(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        (rows,) = given
        return (inputs(rows.reshape(-1, rows.shape[-1])).view_as(rows),)

    found.register_forward_pre_hook(rounded_rows)
    return found


def round_model(model: Any, way: Way) -> None:
    """Replace the linear layers of a decoder by rounded ones, in place."""
    for name, layer in list(model.blocks.named_modules()):
        if isinstance(layer, nn.Linear):
            owner, _, leaf = name.rpartition(".")
            setattr(model.blocks.get_submodule(owner), leaf, rounding(layer, way.weights, way.inputs))
    last = model.unembedding or linear_of(model.embedding.weight, None)
    model.head = rounding(last, way.head_weights, way.head_inputs)


@torch.no_grad()
def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's log probability of each token of a text [tokens] except the first."""
    found = []
    for first in range(0, len(ids) - 1, WINDOW):
        inputs, targets = ids[first : first + WINDOW][: len(ids) - 1 - first], ids[first + 1 : first + 1 + WINDOW]
        found.append(model(inputs[None])[0].log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return torch.cat(found)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each combination of roundings."""
    torch.set_num_threads(args.threads)
    first = None
    for way in WAYS:
        loaded = load_model(args.model, "float32", verify="sizes", quantization="none")
        assert loaded.tokenizer is not None  # noqa: S101 -- models of text have one
        ids = torch.tensor(loaded.tokenizer.encode(args.text.read_text("utf-8"))[: args.tokens + 1])
        round_model(loaded.model, way)
        found = log_probabilities(loaded.model, ids)
        first = found if first is None else first
        yield {
            "weights": way.weights.__name__,
            "inputs": way.inputs.__name__,
            "head": f"{way.head_weights.__name__}, {way.head_inputs.__name__}",
            "perplexity": round(math.exp(-float(found.mean())), 3),
            "loss": round(-float(found.mean()), 5),
            "mean_absolute_difference_nats": round(float((found - first).abs().mean()), 4),
            "tokens": len(found),
        }


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="model folder")
    p.add_argument("text", type=Path, help="a text, UTF-8")
    p.add_argument("--tokens", type=int, default=2048, help="how many tokens from its beginning are predicted")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    facts = {"question": "perplexity on real text by roundings of weights and rows", "text": args.text.name}
    write_report("fp8_weights_cpu", facts, rows(args), args.out)


if __name__ == "__main__":
    main()
