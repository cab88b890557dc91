"""Linear layers with prepacked or quantized weights, and embeddings kept in their stored dtype."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attn_models.quantization import INT4_GROUP
from attn_models.quantization.block_tensor import BlockTensor


class StoredEmbedding(nn.Module):
    """An embedding whose table [tokens, width] keeps its stored dtype, in memory or in its file; it returns `dtype`."""

    table: Tensor

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", table.detach())
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """The embeddings [..., width] of token ids [...]."""
        table = self.table
        rows = table.rows(tokens) if isinstance(table, BlockTensor) else nn.functional.embedding(tokens, table)
        return rows.to(self.dtype)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer that uses these tensors without copying them; they get no gradients."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


class SideBySide(nn.Module):
    """Several layers that read the same input as one module, whose output concatenates theirs."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, rows: Tensor) -> Tensor:
        """Map `rows` [..., inputs] to [..., outputs of all layers]."""
        return torch.cat([layer(rows) for layer in self.layers], dim=-1)


class QuantizedLinear(nn.Module):
    """Base class of linear layers with packed weights; subclasses define the product, not its shape, dtype and bias."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.outputs, self.inputs = weight.shape
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    def forward(self, rows: Tensor) -> Tensor:
        """Map `rows` [..., inputs] to [..., outputs], in the dtype of `rows`."""
        flat = rows.reshape(-1, self.inputs)
        out = self.multiply(flat).to(rows.dtype)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.view(*rows.shape[:-1], self.outputs)

    @abstractmethod
    def multiply(self, rows: Tensor) -> Tensor:
        """The product of `rows` [rows, inputs] with the weights, [rows, outputs], without bias, in any dtype."""

    def extra_repr(self) -> str:
        """The sizes, in the form of torch's own layers."""
        return f"inputs={self.inputs}, outputs={self.outputs}"


class PlainLinear(QuantizedLinear):
    """Unpacked weights in any floating-point dtype."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.register_buffer("weight", weight.detach().contiguous())

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply in the dtype of the weights."""
        return nn.functional.linear(rows.to(self.weight.dtype), self.weight)


class OneDnnLinear(QuantizedLinear):
    """Weights prepacked into oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.element = weight.dtype
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)  # noqa: SLF001
        self.register_buffer("weight", packed, persistent=False)

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply in the dtype of the weights."""
        rows = rows.to(self.element).contiguous()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, None, "none", [], "")  # noqa: SLF001
        return out


INT8_ALIGNMENT = 16
"""Row sizes must be multiples of this: otherwise torch 2.13 with AVX-512 reads past the end of rows, which gives wrong
sums or a crash."""


class Int8Linear(QuantizedLinear):
    """Weights as whole numbers from -127 to 127, times a scale (`scales`) for each output."""

    numbers: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        weight = weight.detach()
        scales = (weight.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
        self.register_buffer("numbers", torch.round(weight / scales[:, None]).to(torch.int8))
        self.register_buffer("scales", scales)

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply in bfloat16; the scales are applied in float32, as rounding them would change every output."""
        inputs = rows.to(torch.bfloat16).contiguous()
        if inputs.shape[-1] % INT8_ALIGNMENT:
            out = inputs @ self.numbers.to(torch.bfloat16).T
        else:
            ones = self.scales.new_ones(self.outputs, dtype=torch.bfloat16)
            out = torch._weight_int8pack_mm(inputs, self.numbers, ones)  # noqa: SLF001
        return out.float() * self.scales


class Int4Linear(QuantizedLinear):
    """Weights as whole numbers from -8 to 7, times a scale plus a zero point (the weight that 0 stands for), which each
    32 inputs of each output share."""

    numbers: Tensor
    scales_and_zeros: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        groups = weight.detach().view(self.outputs, -1, INT4_GROUP)
        least, most = groups.amin(-1), groups.amax(-1)
        scales = ((most - least) / 15).clamp_(min=torch.finfo(torch.float32).tiny)
        numbers = torch.round((groups - least[..., None]) / scales[..., None]).clamp_(0, 15).to(torch.int32)
        packed = torch._convert_weight_to_int4pack_for_cpu(numbers.view(self.outputs, self.inputs), 1)  # noqa: SLF001
        self.register_buffer("numbers", packed)
        packed_scales = torch.stack([scales, least + 8 * scales], -1).transpose(0, 1)
        self.register_buffer("scales_and_zeros", packed_scales.to(torch.bfloat16).contiguous())

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply in bfloat16."""
        rows = rows.to(torch.bfloat16).contiguous()
        out: Tensor = torch._weight_int4pack_mm_for_cpu(  # noqa: SLF001
            rows, self.numbers, INT4_GROUP, self.scales_and_zeros
        )
        return out
