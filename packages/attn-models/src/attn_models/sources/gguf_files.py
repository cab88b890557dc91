"""Converts GGUF files to model folders, at a given path or in a cache for commands that take the file itself."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import inspect
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attn_core import installed
from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed
from attn_schema.home import home_folder
from attn_schema.locks import exclusive
from tokenizers.models import Unigram, WordPiece

from attn_models.adapters.base import EncoderAdapter
from attn_models.sources.progress import Report, Step, silent
from attn_models.tokenizers import Tokenizer, tokenizer_from_gguf
from attn_models.weights import (
    WeightDtype,
    gguf_config,
    import_gguf_weights,
    read_gguf_header,
    read_manifest,
    verify_manifest,
)
from attn_models.weights.atomic_write import staged_folder
from attn_models.weights.checkpoint_folder import CONFIG_NAME, GENERATION_NAME, write_side_files
from attn_models.weights.gguf_reader import parts_of
from attn_models.weights.manifest import file_sha256
from attn_models.weights.safe_files import refuse_code_format

SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "  leading blanks,\ttabs\n\nand lines  ",
    "café naïve Ångström",
    "你好，世界。日本語とハングル 한국어",
    "😀👍🏽👩‍👩‍👧",
    "In 2024, 3.14159 and 1,000,000",
    "def f(x): return {'a': x ** 2}  # code",
)


def check_round_trip(tokenizer: Tokenizer, path: Path) -> None:
    """Raises CheckpointInvalid naming `path` if a sample or a special token is changed by encoding and decoding.

    WordPiece and unigram models may change texts, but no special tokens. SentencePiece with a prefix puts its blank
    behind a special token too, as Llama 2 was trained.
    """
    specials = [tokenizer.token(special) for special in sorted(tokenizer.special_ids)]
    texts = SAMPLES if tokenizer.characters is None else (tokenizer.characters,)
    normalised = isinstance(tokenizer.backend.model, WordPiece | Unigram)
    for sample in () if normalised else (*texts, "".join(specials), *(f"{special}a" for special in specials)):
        ids = tokenizer.encode(sample, add_special=False)
        back = tokenizer.decode(ids, skip_special=False)
        if back != sample and (sample in SAMPLES or back != f"{sample[:-1]} {sample[-1]}"):
            raise CheckpointInvalid.of(path, f"its tokenizer does not round-trip: {sample!r} becomes {back!r}")
    for special in specials:
        if len(tokenizer.encode(special, add_special=False)) != 1:
            raise CheckpointInvalid.of(path, f"its tokenizer splits the special token {special!r} into several tokens")


def convert_gguf(
    path: Path, target: Path, dtype: WeightDtype, report: Report = silent, origin: Mapping[str, Any] | None = None
) -> Path:
    """Write the model of a GGUF file as the folder `target`; arguments and errors are as in `convert`.

    Encoders, which compute many tokens at once, are dequantised where the weights were to stay as stored.
    """
    header = read_gguf_header(path)
    config = gguf_config(header, dtype)
    if dtype == "stored" and isinstance(installed().adapters.get(config["model_type"]), EncoderAdapter):
        dtype = "float32"
        config = gguf_config(header, dtype)
    tokenizer = tokenizer_from_gguf(header)
    if tokenizer is not None:
        if tokenizer.vocab_size > config["vocab_size"]:
            rule = (
                f"the tokenizer has {tokenizer.vocab_size} tokens, but the embedding only {config['vocab_size']} rows"
            )
            raise CheckpointInvalid.of(path, rule)
        check_round_trip(tokenizer, path)
    ends = {key: value for key, value in config.items() if key.endswith("_token_id") and value is not None}
    with staged_folder(target, {"file": path.name, "dtype": dtype, **(origin or {})}) as stage:
        write_side_files(
            stage, {CONFIG_NAME: config, GENERATION_NAME: ends, **(tokenizer.files() if tokenizer else {})}
        )
        import_gguf_weights(
            header, stage, dtype, lambda done, total: report(Step(f"convert {path.name}", done, total, "tensors"))
        )
    return target


CACHE = "gguf"
"""The folder of the cache below the home; each model folder is named after the SHA-256 of its inputs."""
SETTLED = 2.0
"""The seconds after its last change from which a file is recognised without reading it."""
NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR})
"""Error numbers for a cache that is not writable. A full disk is not among them: it is reported."""


def folder_of_gguf(file: str | Path, home: Path | None = None, report: Report = silent) -> Path:
    """The model folder of a GGUF file, with weights as stored; converted on the first call.

    It is below `home`, named after a hash of the file's bytes and of the converter, so that a replaced file or a newer
    release gets another folder. A link beside it says which folder a file of this path, size and time of change has,
    so that it is not hashed again. Of two processes at once one converts and the other waits. If the home is not
    writable, the folder is made for this process only. It may be deleted at any time.

    Raises what `convert` raises for such a file.
    """
    path = Path(file)
    refuse_code_format(path)
    cache = (home_folder() if home is None else home) / CACHE
    link = cache / f".{_identity(path)}"
    if link.is_symlink() and _is_whole(link.resolve()):
        return link.resolve()
    # Within the resolution of clocks a file could change without another time of change.
    settled = time.time() - max(part.stat().st_mtime for part in _files(path)) > SETTLED
    folder = _kept_folder(path, cache, _name(path), report)
    if settled and folder.parent == cache:
        with contextlib.suppress(OSError):
            fresh = cache / f"{link.name}.{os.getpid()}"
            fresh.symlink_to(folder.name)
            fresh.replace(link)
    return folder


def _kept_folder(path: Path, cache: Path, name: str, report: Report) -> Path:
    kept = cache / name
    if _is_whole(kept):
        return kept
    try:
        with exclusive(kept.parent / f".{name}.lock", wait=None):
            return kept if _is_whole(kept) else convert_gguf(path, kept, "stored", report)
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise CheckpointWriteFailed.of(kept, error) from error
    except CheckpointWriteFailed as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in NOT_WRITABLE:
            raise
    own = _own_folder() / CACHE / name
    with exclusive(own.parent / f".{name}.lock", wait=None):
        return own if _is_whole(own) else convert_gguf(path, own, "stored", report)


def folder_at(path: str | Path) -> Path:
    """The folder at a path: the path itself, or for a GGUF file the result of `folder_of_gguf`."""
    return folder_of_gguf(path) if Path(path).is_file() else Path(path)


def _is_whole(folder: Path) -> bool:
    """Whether the folder has all its files in their sizes; `load_model` compares their hashes."""
    try:
        records = read_manifest(folder) if folder.is_dir() else None
        verify_manifest(folder, records or {}, "sizes")
    except CheckpointInvalid:
        return False
    return bool(records)


def _files(path: Path) -> list[Path]:
    """The file, or all parts of the model of which it is one."""
    return [part for part in parts_of(path) if part.exists()]


def _name(path: Path) -> str:
    hashes = [file_sha256(file) for file in _files(path)]
    return hashlib.sha256(f"{hashes} {_converter()}".encode()).hexdigest()[:40]


def _identity(path: Path) -> str:
    """A hash of the path, of what the file system says about the file, and of the converter."""
    found = [(part.resolve(), part.stat()) for part in _files(path)]
    facts = [(place, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns) for place, at in found]
    return hashlib.sha256(repr((facts, _converter())).encode()).hexdigest()[:40]


@cache
def _converter() -> str:
    """A hash of the modules that determine the content of a converted folder, and of their libraries' versions."""
    package = Path(__file__).parents[1]
    # The code of a plugin's architecture is part of the converter.
    plugins = {inspect.getsourcefile(architecture.config) for architecture in installed().gguf_architectures}
    modules = [Path(__file__), *sorted(package.glob("weights/*.py")), *sorted(package.glob("tokenizers/*.py"))]
    modules += sorted(Path(plugin) for plugin in plugins if plugin is not None)
    libraries = " ".join(f"{name} {version(name)}" for name in ("gguf", "tokenizers"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in modules) + libraries.encode()).hexdigest()


@cache
def _own_folder() -> Path:
    """A temporary folder of this process, removed when it exits."""
    made = Path(tempfile.mkdtemp(prefix="attn-gguf-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
