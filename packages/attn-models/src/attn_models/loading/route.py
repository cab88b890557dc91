"""Who builds the model of a folder: its layout here, or transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from attn_core.errors import AttnError, Incompatible, InvalidValue, MissingPackage
from attn_schema.engine import ModelImpl

from attn_models.adapters.base import StateDictAdapter
from attn_models.adapters.registry import causal_class, installed_adapters, through_transformers
from attn_models.encoder_decoder.config import EncoderDecoderConfig
from attn_models.vision_language.config import VisionDecoderConfig
from attn_models.weights import CheckpointFolder

DIFFERS = {("falcon", "alibi")}
"""Families and fields with which batches gave other tokens than transformers, though the steps of loading agreed."""


def takes_route(config: Mapping[str, Any], model_impl: ModelImpl) -> bool:
    """Whether transformers builds the model of a config.json, its layout being asked neither before nor after.

    Raises `MissingPackage` and `Incompatible` where it is asked to and cannot.
    """
    if model_impl != "transformers":
        return model_impl == "auto" and through_transformers(config)
    if find_spec("transformers") is None:
        raise MissingPackage.of("transformers", "model_impl 'transformers'")
    if causal_class(config) is None:
        kind = config.get("model_type")
        rule = f"model_impl 'transformers': it has no causal language model of model_type {kind!r}"
        raise Incompatible(rule, field="model_impl")
    return True


@contextmanager
def goes_on(checkpoint: CheckpointFolder, refusal: AttnError, model_impl: ModelImpl = "auto") -> Iterator[str]:
    """Within this context a model is built by transformers after its layout's `refusal`; gives the reason for people.

    Raises the refusal where transformers does not read the refused field, so would ignore it, where it knows no causal
    class, and where it fails, with what it says.
    """
    if model_impl != "auto" or not _reads(checkpoint, refusal):
        raise refusal
    try:
        yield f"its layout here refuses its {refusal.message.removeprefix(f'{checkpoint.path}/')}"
    except AttnError as error:
        said = (
            f"{refusal.message}; transformers was tried as well: {error.message.removeprefix(f'{checkpoint.path}: ')}"
        )
        raise type(refusal)(said, **refusal.metadata) from error


def _reads(checkpoint: CheckpointFolder, refusal: AttnError) -> bool:
    """Whether an installed transformers has a causal model for a folder, and reads the field that was refused.

    Layouts that see images check more than texts need. Other names of its fields are not read: they are refused only
    where two of them contradict each other.
    """
    own = installed_adapters(StateDictAdapter).get(checkpoint.config["model_type"])  # type: ignore[type-abstract]
    if (
        own is None
        or issubclass(own.Config, EncoderDecoderConfig | VisionDecoderConfig)
        or find_spec("transformers") is None
    ):
        return False
    cause, field = refusal.__cause__ or refusal, refusal.metadata.get("field", "").partition(".")[0]
    if (own.model_type, field) in DIFFERS or not isinstance(cause, InvalidValue | Incompatible):
        return False
    if causal_class(checkpoint.config) is None:
        return False
    from transformers import CONFIG_MAPPING

    return field in CONFIG_MAPPING[own.model_type]().to_dict()
