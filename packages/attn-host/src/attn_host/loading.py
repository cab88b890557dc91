"""What a host needs of a model folder: where it is, how its weights are stored, its kernels and its draft model."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, Incompatible, UnknownName
from attn_core.models import LanguageModel
from attn_models.loading import LoadedModel, load_draft
from attn_models.lora.peft_config import ADAPTER_CONFIG_NAME
from attn_models.sources.gguf_files import folder_of_gguf
from attn_schema import EngineConfig
from attn_schema.home import model_folder_name, model_names, models_folder

CONFIGS = ("config.json", ADAPTER_CONFIG_NAME)
"""What a folder of a model, or of an adapter, has."""


def find_folder(source: str, home: Path, hidden: Collection[str] = ()) -> Path:
    """The folder of a model, or of an adapter, for an absolute path or a name under the home's models; of a GGUF file,
    the folder that is kept of it below the home.

    Names in `hidden` are as if not there.

    Raises `UnknownName` with near names, `CheckpointInvalid` for a path that is no model folder, and for a file what
    `folder_of_gguf` raises.
    """
    given = path_of(source)
    if given.is_absolute():
        if os.path.isfile(given):  # noqa: PTH113
            return folder_of_gguf(given, home)
        # Unlike `Path.is_file`, this raises nothing for paths that are too long or closed to us.
        if not any(os.path.isfile(given / name) for name in CONFIGS):  # noqa: PTH113
            raise CheckpointInvalid.of(given, "is not a model folder: it has no config.json")
        return given
    known = sorted(set(model_names(home, CONFIGS)).difference(hidden))
    if source not in known:
        raise UnknownName.of("model", source, known)
    return models_folder(home) / model_folder_name(source)


def path_of(source: str) -> Path:
    """The path that a source would be, with a home folder for `~`; as it is where nobody has that home."""
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)


def quantization_of(model: Any) -> str:
    """How the weights of a model's linear layers are stored; "none" if they are as loaded."""
    return getattr(model, "quantization", None) or "none"


def use_kernel(model: Any, name: str | None) -> None:
    """Compute all attention with the kernel called `name`; None lets dispatch choose.

    Runs one token, after an encoder input of maximum length if the model reads one, so that a kernel that refuses
    raises `KernelRefused` here and not in the first request, and a device that lacks an operation `Incompatible`.
    """
    if name is not None:
        choosers = [getattr(module, "use_kernel", None) for module in model.modules()]
        chosen = [choose for choose in choosers if choose is not None]
        if not chosen:
            raise Incompatible("no attention of this model is computed by kernels", kernel=name)
        for choose in chosen:
            choose(name)
        if hasattr(model, "take_apart"):
            model.take_apart()  # a kernel of whole blocks has an attention of its own
    device = next(model.parameters()).device
    # Of maximum length: images are no other number of tokens.
    longest = getattr(model, "max_encoder_len", None)
    try:
        with torch.inference_mode():
            one = torch.zeros(1, 1, dtype=torch.int64, device=device)
            model(one) if longest is None else model(one, one.expand(1, longest))
    except (NotImplementedError, TypeError) as error:
        # Of numbers in float64, MPS says that with a TypeError.
        if isinstance(error, TypeError) and "MPS" not in str(error):
            raise
        said = " ".join(str(error).split())[:200]
        message = f"{device} lacks an operation that this model needs; it runs with device cpu: {said}"
        raise Incompatible(message, field="device", device=device) from error


def load_draft_model(served: LoadedModel, config: EngineConfig) -> LanguageModel | None:
    """The draft model of the config; raises `Incompatible` for a model of another vocabulary."""
    if config.draft_model is None:
        return None
    return load_draft(Path(config.draft_model), served, config.dtype, config.quantization)
