"""Opens the kind of host that fits a model folder."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import WrongState
from attn_models.loading.encoders import is_encoder
from attn_models.sources.gguf_files import folder_at
from attn_models.weights.manifest import fingerprint
from attn_schema import EngineConfig

from attn_engine.host.encoder import EncoderHost
from attn_engine.host.engine import EngineHost, OpenRanks
from attn_engine.host.host import Deliver, ModelHost
from attn_engine.host.ranks import require_tensor_parallel


def open_host(folder: Path, config: EngineConfig, deliver: Deliver, open_ranks: OpenRanks | None = None) -> ModelHost:
    """Load the model in `folder`, or in a GGUF file: an encoder, or a model that generates; raises what loading raises.

    `open_ranks` is as in `EngineHost`. Raises `WrongState` for other files than those of `config.fingerprint`.
    """
    if config.fingerprint and fingerprint(folder) != config.fingerprint:
        raise WrongState(f"the files of {folder.name!r} have changed since it was loaded; unload it and load it again")
    folder = folder_at(folder)
    if is_encoder(folder):
        require_tensor_parallel(folder, config)
        return EncoderHost(folder, config)
    return EngineHost(folder, config, deliver, open_ranks)
