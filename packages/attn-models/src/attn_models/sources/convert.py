"""Converts a model file or folder to a checkpoint folder of attn's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue

from attn_models.sources.gguf_files import convert_gguf
from attn_models.sources.progress import Report, silent
from attn_models.tokenizers import Tokenizer
from attn_models.weights import CheckpointFolder, WeightDtype, read_folder
from attn_models.weights.checkpoint_folder import GENERATION_NAME, ExtraFile, write_folder
from attn_models.weights.safe_files import member, refuse_code_format

if TYPE_CHECKING:
    from attn_models.adapters.base import Layout

PREPROCESSOR_NAME = "preprocessor_config.json"
DTYPES: tuple[WeightDtype, ...] = ("stored", "bfloat16", "float32")


def convert(
    source: str | Path,
    target: str | Path,
    dtype: WeightDtype = "stored",
    *,
    report: Report = silent,
    origin: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model at `source`, a GGUF file or a checkpoint folder, as a checkpoint folder at `target`.

    `stored` keeps weights as they are: matrices of a GGUF file stay in its blocks where kernels multiply these, floats
    keep their dtype, and other quantised weights become float32. bfloat16 rounds dequantised weights, float32 keeps
    them, and other programs can read both. `origin` is recorded in the manifest. The folder appears completely or not
    at all; an existing one is replaced.

    Raises CheckpointInvalid for a source that is malformed, hostile or in a format that runs code, UnknownName and
    Incompatible for unsupported models, CheckpointWriteFailed for a failing disk.
    """
    if dtype not in DTYPES:
        raise InvalidValue.of("dtype", dtype, " or ".join(DTYPES))
    path = Path(source)
    if path.is_dir():
        return _convert_folder(path, Path(target), dtype, origin)
    if not path.is_file():
        raise CheckpointInvalid.of(path, "is neither a file nor a folder")
    refuse_code_format(path)
    return convert_gguf(path, Path(target), dtype, report, origin)


def _convert_folder(path: Path, target: Path, dtype: WeightDtype, origin: Mapping[str, Any] | None) -> Path:
    import torch

    from attn_models.adapters.registry import packages_of, require_known_family
    from attn_models.adapters.state_dict import stored_type
    from attn_models.weights.quantized_tensors import with_plain_weights

    folder = with_plain_weights(read_folder(path))
    layout = require_known_family(folder.config.get("model_type"), folder.config.get("requires"))
    require_plain_pooling(path, folder.config)
    require_loads(folder, layout)
    tokenizer = Tokenizer.from_folder(path) if folder.tokenizer is not None else None
    wanted = None if dtype == "stored" else getattr(torch, dtype)
    tensors = {name: t.to(wanted) if wanted and t.is_floating_point() else t for name, t in folder.tensors.items()}
    extra: dict[str, ExtraFile] = {
        **(tokenizer.files() if tokenizer else {}),
        GENERATION_NAME: folder.generation_config,
    }
    if (path / PREPROCESSOR_NAME).is_file():  # the preprocessing of images and audio
        extra[PREPROCESSOR_NAME] = member(path, PREPROCESSOR_NAME)
    # Older files name the dtype torch_dtype; two names could contradict each other.
    config = {key: value for key, value in folder.config.items() if key != "torch_dtype"}
    needed = {} if layout is None else packages_of(layout)
    written = str(stored_type(folder)).removeprefix("torch.") if dtype == "stored" else dtype
    return write_folder(target, {**config, **needed, "dtype": written}, tensors, extra, origin)


def require_loads(folder: CheckpointFolder, layout: Layout | None) -> None:
    """Check that the folder loads as the model that its config describes; raises what loading it raises."""
    from attn_models.adapters.base import EncoderAdapter
    from attn_models.adapters.clip import ClipImageLayout
    from attn_models.adapters.state_dict import stored_type
    from attn_models.adapters.vit import VitAdapter
    from attn_models.loading import load_model
    from attn_models.loading.encoders import build_encoder, load_image_classifier
    from attn_models.loading.images import load_image_encoder

    stored = stored_type(folder)
    if isinstance(layout, EncoderAdapter):
        build_encoder(folder, stored)
    elif isinstance(layout, VitAdapter):
        load_image_classifier(folder.path, verify="sizes")
    elif isinstance(layout, ClipImageLayout):
        load_image_encoder(folder.path, verify="sizes")
    else:
        load_model(folder.path, str(stored).removeprefix("torch."), verify="sizes")


MODULES = "modules.json"


def require_plain_pooling(folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The files of a folder that only set mean pooling, which is the default of a folder without them.

    Raises `Incompatible` for other modules of sentence-transformers: their folders cannot be kept in attn's layout.
    """
    if not (folder / MODULES).is_file():
        return ()
    from attn_models.loading.pooling import read_pooling
    from attn_models.loading.sentence_settings import SentenceSettings, read_sentence_settings

    settings, context = read_sentence_settings(folder), config.get("max_position_embeddings", 0)
    kept = replace(settings, limit=None) == SentenceSettings() and (settings.limit or context) >= context
    if not kept or not read_pooling(folder, config.get("hidden_size", 0)).is_mean:
        rule = f"the pooling of its {MODULES}, or how its texts are read, would be lost; load the folder as it is"
        raise Incompatible(f"{folder}: {rule}", path=folder)
    return (MODULES,)
