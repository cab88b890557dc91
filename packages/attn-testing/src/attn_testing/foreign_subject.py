"""A foreign attention, called as the laws need it: with inputs of any length, causal or not, and with padding."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
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
    "input_mask": "keep",
}
"""Arguments of modules for padding, and what they mean: True for tokens to "drop" or to "keep", or "ones" to keep."""

STATES = (
    ("cache", "return_cache"),
    ("cache", "return_next_cache"),
    ("prev_hidden", "return_next_prev_hidden"),
)
"""Arguments of modules for what is kept of earlier tokens, and to return it; it is the last of what they return."""
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
    tokens = 11
    """The tokens of a sequence in most laws; see `smallest`."""
    multiple = 1
    """What lengths must be multiples of."""
    growth = 2
    """The power of the number of tokens with which its products may grow: 1 for what promises to be linear."""

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

    @property
    def resumes(self) -> bool:
        """Whether `pieces` can be given."""
        return False

    @property
    def packs(self) -> bool:
        """Whether `packed` can be given."""
        return False

    @abstractmethod
    def call(self, inputs: Sequence[Tensor], padding: Tensor | None) -> Any:
        """What the implementation returns; `padding` [batch, keys] is True for tokens that must not be read."""

    def pieces(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:  # noqa: ARG002 -- as overridden
        """The output where the tokens are given in pieces of these lengths, each after what is kept of those before."""
        raise Incompatible(f"{self.name} has no argument known to continue a sequence")

    def packed(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:  # noqa: ARG002 -- as overridden
        """The output where each sequence is documents of these lengths, end to end."""
        raise Incompatible(f"{self.name} has no argument known to keep documents apart")

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

    def several(self, tokens: int) -> int:
        """At least so many tokens, a length that it takes."""
        return -(-tokens // self.multiple) * self.multiple

    def attend(self, inputs: Sequence[Tensor], padding: Tensor | None = None) -> Tensor:
        """The output, the first tensor of a tuple; raises `Incompatible` where there is none."""
        return self.tensor(self.call(inputs, padding))

    def tensor(self, found: Any) -> Tensor:
        """The tensor of what was returned, see `attend`."""
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
                    found = self.cast(dtype).attend(self.inputs(1, self.several(3), dtype=dtype))
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
        inputs = [part.requires_grad_() for part in self.inputs(1, self.several(3))]
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

    axis, parts = 2, 3

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

    @property
    def resumes(self) -> bool:
        """Queries may be fewer than keys."""
        return self.causal

    @property
    def packs(self) -> bool:
        """Whether there is a mask."""
        return bool(self.known & MASKS)

    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """[batch, heads, tokens, size]."""
        return batch, HEADS, tokens, SIZE

    def call(self, inputs: Sequence[Tensor], padding: Tensor | None) -> Any:
        """See `Foreign`; a mask replaces the flag where both are needed."""
        query, key, _ = inputs
        masked = padding is not None or (self.causal and self.flag is None)
        if "module" in self.known:
            masked = masked or query.shape[2] != key.shape[2]
        return self._masked(inputs, allowed(query, key, padding, causal=self.causal) if masked else None)

    def pieces(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """The queries of each piece over all keys up to its end."""
        query, key, value = inputs
        ends = list(accumulate(lengths))
        found = [
            self.attend([query[:, :, end - length : end], key[:, :, :end], value[:, :, :end]])
            for end, length in zip(ends, lengths, strict=True)
        ]
        return torch.cat(found, self.axis)

    def packed(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """A mask hides the other documents."""
        seen = allowed(inputs[0], inputs[1], None, causal=self.causal) & same_document(lengths)
        return self.tensor(self._masked(inputs, seen))

    def _masked(self, inputs: Sequence[Tensor], seen: Tensor | None) -> Any:
        """What the function returns with the mask `seen`; None leaves it to the flag."""
        given = dict(self.options)
        if "module" in self.known:
            return self._of_transformers(inputs, seen, given)
        if "block_mask" in self.known:
            given |= {} if seen is None else {"block_mask": self._block_mask(seen)}
        elif seen is not None:
            given["attn_mask"] = seen
        elif self.flag is not None:
            given[self.flag] = self.causal
        return self.function(*inputs, **given)

    def _of_transformers(self, inputs: Sequence[Tensor], seen: Tensor | None, given: dict[str, Any]) -> Any:
        module = nn.Module().eval()
        module.num_key_value_groups, module.is_causal = 1, self.causal  # type: ignore[assignment]
        mask = None
        if seen is not None:
            # Some compute the softmax in float32, where the least number of float64 would be infinite.
            least = max(torch.finfo(inputs[0].dtype).min, torch.finfo(torch.float32).min)
            mask = torch.zeros(seen.shape, dtype=inputs[0].dtype).masked_fill(~seen, least)
        flag = {self.flag: self.causal and mask is None} if self.flag else {}
        found = self.function(module, *inputs, attention_mask=mask, scaling=SIZE**-0.5, dropout=0.0, **flag, **given)
        return found[0].transpose(1, 2)

    def _block_mask(self, seen: Tensor) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        def pair(batch: Any, _head: Any, row: Any, column: Any) -> Any:
            return seen[batch, 0, row, column]

        return create_block_mask(pair, seen.shape[0], None, seen.shape[2], seen.shape[3], device="cpu")


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

    @property
    def resumes(self) -> bool:
        """Whether it takes and returns what it keeps of a sequence, in arguments as in `STATES`."""
        return self.causal and self._state is not None

    @property
    def packs(self) -> bool:
        """Whether there is a mask of pairs."""
        return self.masks is not None

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
        return self._called(rows, given)

    def pieces(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """Each piece is given the state that the call before returned, the last of what it returned; where one is
        refused without a mask of all tokens so far, also that mask."""
        try:
            return self._continued(inputs[0], lengths, None)
        except (AssertionError, ValueError):
            if self.padding is None or self.padding[1] == "drop":
                raise
            return self._continued(inputs[0], lengths, self.padding[0])

    def start(self) -> Any:
        """The state that the first piece of a sequence is given."""
        return None

    def _continued(self, rows: Tensor, lengths: Sequence[int], mask: str | None) -> Tensor:
        taken, asked = self._state or ("", "")
        found: list[Tensor] = []
        state, seen = self.start(), 0
        for piece in torch.split(rows, list(lengths), 1):
            seen += piece.shape[1]
            real = torch.ones(len(rows), seen, dtype=torch.bool if self.padding == (mask, "keep") else torch.int64)
            out, *_, state = self._called(piece, {taken: state, asked: True} | ({} if mask is None else {mask: real}))
            found.append(out)
        return torch.cat(found, 1)

    def packed(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """A mask of pairs hides the other documents."""
        seen = same_document(lengths)
        seen = seen.tril() if self.causal else seen
        return self.tensor(self._called(inputs[0], {str(self.masks): ~seen}))

    @property
    def _state(self) -> tuple[str, str] | None:
        return next((names for names in STATES if set(names) <= self.known), None)

    def _called(self, rows: Tensor, given: Mapping[str, Any]) -> Any:
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


def same_document(lengths: Sequence[int]) -> Tensor:
    """The pairs [token, token] of tokens in one of the documents of these lengths, end to end."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return number[:, None] == number
