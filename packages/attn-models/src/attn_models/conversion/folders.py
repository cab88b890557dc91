"""Convert the models of folders, and save the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core.errors import Incompatible, InvalidValue

from attn_models.adapters.native import NativeAdapter
from attn_models.conversion.heads import METHODS, HeadMap, Method, fewer_heads
from attn_models.conversion.latent import latent_attention
from attn_models.conversion.mechanism import other_mechanism
from attn_models.decoder.decoder import Decoder
from attn_models.evaluation import MAX_WINDOW, text_loss
from attn_models.loading import LoadedModel, load_model, save_model
from attn_models.sources.progress import Report, silent
from attn_models.weights import read_folder
from attn_models.weights.atomic_write import require_replaceable


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of a conversion, written to `folder`.

    `energy` is the share of the weights' squared norm that was kept, at most 1. The losses on a text are in nats per
    token; None without a text.
    """

    folder: Path
    layout: str
    energy: float
    loss_before: float | None = None
    loss_after: float | None = None


def convert_heads(
    folder: Path,
    target: Path,
    heads: int | HeadMap,
    method: Method = "mean",
    *,
    text: str | None = None,
    report: Report = silent,
) -> Converted:
    """Write the model in `folder` with fewer key/value heads to `target`, completely or not at all.

    `heads` is the number of equal groups of consecutive heads to pool, or the map of heads to groups. See
    `fewer_heads`, `load_model` and `save_model` for errors.
    """
    if method not in METHODS:
        raise InvalidValue.of("method", method, ", ".join(METHODS))

    def change(model: Decoder) -> tuple[Decoder, float]:
        if isinstance(heads, HeadMap):
            return fewer_heads(model, heads, method)
        now = model.config.num_kv_heads or model.config.num_heads
        return fewer_heads(model, HeadMap.consecutive(now, heads), method)

    return _convert(folder, target, change, text, report)


def convert_latent(
    folder: Path, target: Path, latent: int | None = None, *, text: str | None = None, report: Report = silent
) -> Converted:
    """Write the model in `folder` with one latent for all keys and values to `target`, completely or not at all.

    See `latent_attention`, `load_model` and `save_model` for errors.
    """
    return _convert(folder, target, lambda model: latent_attention(model, latent), text, report)


def convert_mechanism(
    folder: Path,
    target: Path,
    mechanism: str,
    options: Mapping[str, Any],
    *,
    text: str | None = None,
    report: Report = silent,
) -> Converted:
    """Write the model in `folder` with another mechanism to `target`, completely or not at all.

    See `other_mechanism`, `load_model` and `save_model` for errors.
    """
    return _convert(folder, target, lambda model: other_mechanism(model, mechanism, options), text, report)


def _convert(
    folder: Path, target: Path, change: Callable[[Decoder], tuple[Decoder, float]], text: str | None, report: Report
) -> Converted:
    require_replaceable(target)
    loaded = load_model(folder)
    tokens = None if text is None else _tokens(loaded, text)
    model, energy = change(loaded.model)
    model.eval()
    layout = _save(target, model, loaded, str(read_folder(folder).config.get("model_type")))
    losses = {} if tokens is None else _losses(tokens, loaded.model, model, report)
    return Converted(folder=target, layout=layout, energy=energy, **losses)


def _losses(tokens: list[int], before: Decoder, after: Decoder, report: Report) -> dict[str, float]:
    models = {"loss_before": before, "loss_after": after}
    window = min(before.max_seq_len, MAX_WINDOW)
    return {
        name: text_loss(model, tokens, window, report=report, stage=name.replace("_", " "))
        for name, model in models.items()
    }


def _save(target: Path, model: Decoder, loaded: LoadedModel, own: str) -> str:
    """Save in the layout `own` if it can express the model, else in attn's; returns the layout used."""
    try:
        save_model(target, model, loaded.tokenizer, layout=own, base=loaded)
    except Incompatible:
        save_model(target, model, loaded.tokenizer, base=loaded)
        return NativeAdapter.model_type
    return own


def _tokens(loaded: LoadedModel, text: str) -> list[int]:
    if loaded.tokenizer is None:
        raise Incompatible(
            f"{loaded.path} has no tokenizer, which is needed to compute the loss of a text", path=loaded.path
        )
    return loaded.tokenizer.encode(text)
