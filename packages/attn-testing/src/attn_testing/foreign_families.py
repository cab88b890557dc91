"""Adapters for families of foreign attention whose arguments have meanings of their own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from attn_core.errors import Incompatible
from torch import Tensor, nn

from attn_testing.foreign_subject import HEADS, SIZE, WIDTH, Foreign, ForeignModule, parameters

CONFIG: Mapping[str, int] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": SIZE,
    "vocab_size": 32,
    "max_position_embeddings": 2048,
}
"""The sizes of models of transformers, where none are given."""


class XTransformersLayers(ForeignModule):
    """A stack of layers of x-transformers: it takes all tokens again with its cache, and the number of new ones."""

    asks = frozenset({"cache", "cache_age", "return_hiddens"})

    @property
    def resumes(self) -> bool:
        """Whether it is causal."""
        return self.causal

    def pieces(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """See `Foreign`."""
        found, cache = [], None
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            given: dict[str, Any] = {} if cache is None else {"cache": cache, "cache_age": length}
            out, cache = self.module(inputs[0][:, :end], return_hiddens=True, **given)
            found.append(out)
        return torch.cat(found, 1)


class FlaLayer(ForeignModule):
    """A layer of flash-linear-attention, with its cache and the starts of documents in `cu_seqlens`."""

    asks = frozenset({"hidden_states", "past_key_values", "use_cache"})
    tolerance = 1e-4
    """Kernels compute in float32, whatever the dtype."""

    @property
    def resumes(self) -> bool:
        """Always."""
        return True

    @property
    def packs(self) -> bool:
        """Always."""
        return True

    @property
    def _state(self) -> tuple[str, str]:
        return "past_key_values", "use_cache"

    def start(self) -> Any:
        """An empty cache."""
        return importlib.import_module("fla.models.utils").Cache()

    def packed(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """See `Foreign`."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return self.tensor(self.module(inputs[0], cu_seqlens=starts))


class TransformersModel(Foreign):
    """A model of transformers without its embedding: hidden states in, hidden states out, [batch, tokens, width].

    Padding has positions as in `generate`; documents end to end are told by positions that restart.
    """

    axis, parts = 1, 1
    tolerance = 1e-4
    """Norms and rotary angles are computed in float32 there, whatever the dtype."""

    def __init__(self, name: str, model: nn.Module, *, causal: bool) -> None:
        super().__init__(name, causal=causal)
        self.model: Any = model.eval()
        self.known = parameters(model.forward)
        self.cache = next((one for one in ("cache", "past_key_values") if one in self.known), None)

    @property
    def pads(self) -> bool:
        """Whether there is a mask."""
        return "attention_mask" in self.known

    @property
    def resumes(self) -> bool:
        """Whether it is causal, with a cache."""
        return self.causal and self.cache is not None

    @property
    def packs(self) -> bool:
        """Whether it takes positions."""
        return self.causal and "position_ids" in self.known

    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """[batch, tokens, width]."""
        return batch, tokens, WIDTH

    def call(self, inputs: Sequence[Tensor], padding: Tensor | None) -> Any:
        """See `Foreign`."""
        given: dict[str, Any] = {} if padding is None else {"attention_mask": (~padding).long()}
        if padding is not None and self.packs:
            given["position_ids"] = ((~padding).cumsum(1) - 1).clamp(min=0)
        return self._states(inputs[0], **given)

    def pieces(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """See `Foreign`."""
        found, cache = [], None
        for piece in torch.split(inputs[0], list(lengths), 1):
            out = self.model(inputs_embeds=piece, use_cache=True, **{str(self.cache): cache})
            found.append(out.last_hidden_state)
            cache = getattr(out, str(self.cache))
        return torch.cat(found, 1)

    def packed(self, inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """See `Foreign`."""
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        return self._states(inputs[0], position_ids=places)

    def cast(self, dtype: torch.dtype) -> TransformersModel:
        """The same model, whose weights are converted in place."""
        self.model.to(dtype)
        return self

    def _states(self, rows: Tensor, **given: Any) -> Tensor:
        kept = {"use_cache": False} if self.cache else {}
        return self.tensor(self.model(inputs_embeds=rows, **kept, **given)["last_hidden_state"])


ADAPTERS: tuple[type[XTransformersLayers | FlaLayer], ...] = (XTransformersLayers, FlaLayer)
"""The adapters of modules, chosen by the arguments that they ask for."""


def adapted(name: str, module: nn.Module, *, causal: bool, padding: tuple[str, str] | None) -> Foreign:
    """The module as the laws call it: by the adapter of its family or, outside these, by its arguments."""
    if hasattr(module, "config") and "inputs_embeds" in parameters(module.forward):
        return TransformersModel(name, module, causal=causal)
    known = parameters(module.forward)
    family = next((one for one in ADAPTERS if one.asks <= known), ForeignModule)
    return family(name, module, causal=causal, padding=padding)


def configured(target: str, found: type[nn.Module], options: Mapping[str, Any]) -> nn.Module:
    """A model of transformers with a small config, of which `options` are further fields."""
    config_class: Any = found.config_class  # type: ignore[attr-defined]
    try:
        return found(config_class(**{**CONFIG, "attn_implementation": "eager", **options}))
    except Exception as error:  # whatever a stranger's constructor raises
        raise Incompatible(f"{target} cannot be built: {type(error).__name__}: {error}") from error


def takes_config(found: type[nn.Module]) -> bool:
    """Whether a class is a model of transformers."""
    return hasattr(found, "config_class") and "config" in inspect.signature(found).parameters
