"""A foreign attention, called as the laws need it: with inputs of any length, causal or not, and with padding."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attn_core.errors import Incompatible, InvalidValue
from torch import Tensor, nn

HEADS, SIZE, WIDTH = 2, 8, 16
"""The heads, their size and the width of the inputs that laws draw."""

PADDING: Mapping[str, str] = {
    "key_padding_mask": "drop",
    "src_key_padding_mask": "drop",
    "attention_mask": "ones",
    "mask": "keep",
}
"""Arguments of modules for padding, and what they mean: True for tokens to "drop" or to "keep", or "ones" to keep."""

CAUSAL = ("is_causal", "causal")
MASKS = frozenset({"attn_mask", "attention_mask", "block_mask"})
"""Arguments of functions for masks of pairs."""
SIZES: Mapping[str, int] = dict.fromkeys(
    ("embed_dim", "dim", "hidden_size", "d_model", "dim_model"), WIDTH
) | dict.fromkeys(("num_heads", "heads", "nhead", "n_heads", "num_attention_heads"), HEADS)
"""Arguments of constructors for sizes, and their values where none are given."""


class Foreign(ABC):
    """An attention of another package. `name` is its `package:object`; `causal` asks for causal attention.

    Its inputs are `parts` tensors with tokens along `axis`, and so is its output.
    """

    axis: int
    parts: int
    apart = False
    """Whether queries are given apart from keys, so that there may be fewer of them."""

    def __init__(self, name: str, *, causal: bool) -> None:
        self.name = name
        self.causal = causal

    @property
    def label(self) -> str:
        """A name of this case."""
        return "causal" if self.causal else "bidirectional"

    @property
    @abstractmethod
    def pads(self) -> bool:
        """Whether padding can be given."""

    @abstractmethod
    def call(self, inputs: Sequence[Tensor], padding: Tensor | None) -> Any:
        """What the implementation returns; `padding` [batch, keys] is True for tokens that must not be read."""

    @abstractmethod
    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """The shape of each input."""

    def inputs(self, batch: int, tokens: int, seed: int = 1, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Random inputs."""
        drawn = torch.Generator().manual_seed(seed)
        shape = self.shape(batch, tokens)
        return [
            torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype or self.dtype) for _ in range(self.parts)
        ]

    def attend(self, inputs: Sequence[Tensor], padding: Tensor | None = None) -> Tensor:
        """The output, the first tensor of a tuple; raises `Incompatible` where there is none."""
        found = self.call(inputs, padding)
        found = found[0] if isinstance(found, (tuple, list)) and found else found
        if not isinstance(found, Tensor):
            raise Incompatible(f"{self.name} returns {type(found).__name__}, and no tensor to judge")
        return found

    def some(self, inputs: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """The inputs of the tokens from `start` to `stop`."""
        return [part.narrow(self.axis, start, stop - start) for part in inputs]

    @cached_property
    def dtype(self) -> torch.dtype:
        """float64 if the implementation computes in it, else float32; raises `Incompatible` if neither runs here."""
        reasons = []
        for dtype in (torch.float64, torch.float32):
            try:
                with torch.no_grad():
                    found = self.cast(dtype).attend(self.inputs(1, 3, dtype=dtype))
                if not found.isfinite().all():
                    reasons.append(f"its outputs in {dtype} are not finite")
                    continue
            except Incompatible:
                raise
            except Exception as error:  # noqa: BLE001 -- whatever a stranger's code raises
                reasons.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            else:
                return dtype
        raise Incompatible(f"{self.name} cannot run here: {reasons[-1]}")

    @cached_property
    def no_gradients(self) -> str | None:
        """Why it has no gradients here; None if it has."""
        inputs = [part.requires_grad_() for part in self.inputs(1, 3)]
        try:
            torch.autograd.grad(self.attend(inputs).sum(), inputs, allow_unused=True)
        except Exception as error:  # noqa: BLE001 -- whatever a stranger's code raises
            return f"it has no gradients here: {str(error).partition('.')[0]}"
        return None

    def cast(self, dtype: torch.dtype) -> Foreign:  # noqa: ARG002 -- functions compute in the dtype of their inputs
        """The same with weights of another dtype."""
        return self

    @property
    def tolerance(self) -> float:
        """The tolerance between two computations of the same result."""
        return 1e-9 if self.dtype == torch.float64 else 1e-4


class ForeignFunction(Foreign):
    """A function of queries, keys and values [batch, heads, tokens, size].

    Known are arguments that make it causal, torch's `attn_mask`, FlexAttention's `block_mask`, and the interface of
    attention functions of transformers, whose first argument is the `module`. `options` are further arguments.
    """

    axis, parts, apart = 2, 3, True

    def __init__(self, name: str, function: Callable[..., Any], *, causal: bool, options: Mapping[str, Any]) -> None:
        super().__init__(name, causal=causal)
        self.function, self.options = function, dict(options)
        self.known = parameters(function)
        self.flag = next((one for one in CAUSAL if one in self.known), None)
        if causal and self.flag is None and not self.known & MASKS:
            raise Incompatible(f"{name} has no argument known to make it causal")

    @property
    def pads(self) -> bool:
        """Whether there is a mask."""
        return bool(self.known & (MASKS - {"block_mask"}))

    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """[batch, heads, tokens, size]."""
        return batch, HEADS, tokens, SIZE

    def call(self, inputs: Sequence[Tensor], padding: Tensor | None) -> Any:
        """See `Foreign`; a mask replaces the flag where both are needed."""
        query, key, _ = inputs
        given = dict(self.options)
        if "module" in self.known:
            return self._of_transformers(inputs, padding, given)
        if "block_mask" in self.known:
            given |= {"block_mask": self._block_mask(query, key)} if self.causal else {}
        elif padding is not None or (self.causal and self.flag is None):
            given["attn_mask"] = allowed(query, key, padding, causal=self.causal)
        elif self.flag is not None:
            given[self.flag] = self.causal
        return self.function(*inputs, **given)

    def _of_transformers(self, inputs: Sequence[Tensor], padding: Tensor | None, given: dict[str, Any]) -> Any:
        query, key, _ = inputs
        module = nn.Module().eval()
        module.num_key_value_groups, module.is_causal = 1, self.causal  # type: ignore[assignment]
        mask = None
        if padding is not None or (self.causal and self.flag is None) or query.shape[2] != key.shape[2]:
            seen = allowed(query, key, padding, causal=self.causal)
            # Some compute the softmax in float32, where the least number of float64 would be infinite.
            least = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)
            mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, least)
        flag = {self.flag: self.causal and mask is None} if self.flag else {}
        found = self.function(module, *inputs, attention_mask=mask, scaling=SIZE**-0.5, dropout=0.0, **flag, **given)
        return found[0].transpose(1, 2)

    def _block_mask(self, query: Tensor, key: Tensor) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        def before(_batch: Any, _head: Any, row: Any, column: Any) -> Any:
            return row + (key.shape[2] - query.shape[2]) >= column

        return create_block_mask(before, None, None, query.shape[2], key.shape[2], device="cpu")


class ForeignModule(Foreign):
    """A module of hidden states [batch, tokens, width], or one that is given them as query, key and value.

    `padding` names the argument for padding and its form, one of "drop", "keep" and "ones", see `PADDING`.
    """

    axis, parts = 1, 1

    def __init__(self, name: str, module: nn.Module, *, causal: bool, padding: tuple[str, str] | None = None) -> None:
        super().__init__(name, causal=causal)
        self.module = module.eval()
        self.known = parameters(module.forward)
        usual = next(((one, form) for one, form in PADDING.items() if one in self.known), None)
        self.padding = padding or usual
        self.of_torch = {"query", "key", "value"} <= self.known or "src_mask" in self.known
        # Elsewhere True in a mask may be a pair to keep.
        self.masks = next((one for one in ("attn_mask", "src_mask") if one in self.known and self.of_torch), None)
        self.flag = next((one for one in CAUSAL if one in self.known), None)
        if padding is not None and padding[1] not in {"drop", "keep", "ones"}:
            raise InvalidValue.of("padding", padding[1], "drop, keep or ones")

    @property
    def pads(self) -> bool:
        """Whether an argument for padding is known."""
        return self.padding is not None

    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """[batch, tokens, width]."""
        return batch, tokens, WIDTH

    def call(self, inputs: Sequence[Tensor], padding: Tensor | None) -> Any:
        """See `Foreign`."""
        (rows,) = inputs
        given: dict[str, Any] = {}
        if self.causal and self.masks is not None:
            # torch's modules want the mask beside the flag, which is only a hint there.
            given[self.masks] = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool).triu(1)
        elif self.flag is not None:
            given[self.flag] = self.causal
        if padding is not None and self.padding is not None:
            name, form = self.padding
            given[name] = padding if form == "drop" else ~padding if form == "keep" else (~padding).long()
        same = (rows, rows, rows) if {"query", "key", "value"} <= self.known else (rows,)
        return self.module(*same, **given)

    def cast(self, dtype: torch.dtype) -> ForeignModule:
        """The same module, whose weights are converted in place."""
        self.module.to(dtype)
        return self


def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters; empty where it does not say."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        # Functions in C have their signature as the first line of their documentation.
        words = (inspect.getdoc(function) or "").partition(")")[0]
        return frozenset(word for word in (*CAUSAL, "attn_mask", "dropout_p") if word in words)


def allowed(query: Tensor, key: Tensor, padding: Tensor | None, *, causal: bool) -> Tensor:
    """The pairs [batch, 1, query, key] to attend to, the last query being the last key's token."""
    queries, keys = query.shape[2], key.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen = seen.tril(keys - queries) if causal else seen
    whole = seen.expand(query.shape[0], 1, queries, keys)
    return whole if padding is None else whole & ~padding[:, None, None, :]
