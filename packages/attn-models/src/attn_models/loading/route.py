"""Where transformers builds a model whose config its layout here refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from attn_core.errors import AttnError, InvalidValue

from attn_models.adapters.base import StateDictAdapter
from attn_models.adapters.registry import causal_class, installed_adapters
from attn_models.encoder_decoder.config import EncoderDecoderConfig
from attn_models.weights import CheckpointFolder


@contextmanager
def goes_on(checkpoint: CheckpointFolder, refusal: AttnError) -> Iterator[str]:
    """Within this context a model is built by transformers after its layout's `refusal`; gives the reason, a sentence.

    Raises the refusal where transformers does not read the refused field, so would ignore it, or knows no causal class,
    and where it fails, with what it says.
    """
    if not _reads(checkpoint, refusal):
        raise refusal
    start = f"{checkpoint.path}: "
    try:
        yield f"its layout here refuses the config ({refusal.message.removeprefix(f'{checkpoint.path}/config.json: ')})"
    except AttnError as error:
        said = f"{refusal.message}; transformers was tried as well: {error.message.removeprefix(start)}"
        raise type(refusal)(said, **refusal.metadata) from error


def _reads(checkpoint: CheckpointFolder, refusal: AttnError) -> bool:
    """Whether an installed transformers has a causal model for a folder, and reads the field that was refused."""
    own = installed_adapters(StateDictAdapter).get(checkpoint.config["model_type"])  # type: ignore[type-abstract]
    if own is None or issubclass(own.Config, EncoderDecoderConfig) or find_spec("transformers") is None:
        return False
    cause, field = refusal.__cause__ or refusal, refusal.metadata.get("field", "").partition(".")[0]
    if not field or not isinstance(cause, InvalidValue) or causal_class(checkpoint.config) is None:
        return False
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[own.model_type]
    return field in known.attribute_map or hasattr(known(), field)
