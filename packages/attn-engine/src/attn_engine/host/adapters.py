"""The LoRA adapters that are loaded on a model, by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b, file_digest
from pathlib import Path

from attn_core.errors import AlreadyExists, Incompatible, OutOfCapacity, UnknownName
from attn_models.loading import LoadedModel
from attn_models.lora import AdaptedModel, LoraAdapter, read_adapter
from attn_models.lora.files import ADAPTER_NAME
from attn_models.lora.peft_config import ADAPTER_CONFIG_NAME

from attn_engine.engine import Engine
from attn_engine.loop import EngineLoop


class LoadedAdapters:
    """At most `max_loras` adapters on a loaded model, whose engine runs in `loop`. Thread-safe.

    The model is not modified until the first adapter is loaded.
    """

    def __init__(self, loaded: LoadedModel, loop: EngineLoop, max_loras: int) -> None:
        self._loaded = loaded
        self._loop = loop
        self._max_loras = max_loras
        self._adapters: dict[str, LoraAdapter] = {}
        self._adapted: AdaptedModel | None = None
        self._lock = threading.Lock()

    def find(self, name: str) -> LoraAdapter | None:
        """The adapter of this name; None for an empty name. Raises `UnknownName`, which suggests similar names."""
        if not name:
            return None
        found = self._adapters.get(name)
        if found is None:
            raise UnknownName.of("adapter", name, self._adapters)
        return found

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder or a GGUF file; returns when requests can use it.

        Loading the same adapter again under its name does nothing, as several gateways may load it. Raises
        `AlreadyExists` for the name of another adapter, `OutOfCapacity` if `max_loras` are loaded, `Incompatible` for
        an adapter of another base model or a model that is not a decoder, `CheckpointInvalid` for an invalid folder.
        """
        if self._loaded.max_encoder_len is not None:
            raise Incompatible(f"adapter {name!r}: only decoders support adapters", adapter=name)
        with self._lock:
            # The key has a digest, so that KV cache computed with other weights of the same name is not reused.
            key = f"{name}:{_digest_of(folder)}"
            if name in self._adapters:
                if self._adapters[name].key == key:
                    return
                raise AlreadyExists(f"another adapter is loaded as {name!r}; unload it first", adapter=name)
            if len(self._adapters) >= self._max_loras:
                text = f"{self._max_loras} adapters are loaded (max_loras); unload one, or load the model with more"
                raise OutOfCapacity(text, max_loras=self._max_loras)
            adapter = read_adapter(folder, self._loaded.model, self._loaded.path, key)
            if len(adapter.tables):
                tables = " and ".join(adapter.tables)
                raise Incompatible(
                    f"adapter {name!r}: it changes the {tables}, which requests share: merge it into its base "
                    "(`attn convert merge`)",
                    adapter=name,
                )
            if self._adapted is None:
                self._loop.call(self._attach).result()
            self._adapters[name] = adapter

    def unload(self, name: str) -> None:
        """Remove an adapter; running requests continue to use it."""
        with self._lock:
            self._adapters.pop(name, None)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Context manager in which forward passes over whole sequences in this thread use the named adapter, if any."""
        adapter = self.find(name)
        if adapter is None or self._adapted is None:
            yield
            return
        with self._adapted.using([(adapter, 0)]):
            yield

    def _attach(self, engine: Engine) -> None:
        self._adapted = AdaptedModel(self._loaded.model)
        engine.use_adapters(self._adapted)


def _digest_of(folder: Path) -> str:
    """A digest of an adapter's files, equal in every process. Missing files are left to the reader to report."""
    found = blake2b(digest_size=16)
    for path in (folder, folder / ADAPTER_CONFIG_NAME, folder / ADAPTER_NAME):
        if path.is_file():
            with path.open("rb") as file:
                found.update(file_digest(file, blake2b).digest())
    return found.hexdigest()
