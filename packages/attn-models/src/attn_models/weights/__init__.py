"""Weights on disk: checkpoint folders in the Hugging Face layout, and the import of GGUF files.

Importing this package imports no torch; reading or writing tensors does.
"""

from attn_models.weights.atomic_write import staged_folder
from attn_models.weights.checkpoint_folder import CheckpointFolder, read_folder, write_folder
from attn_models.weights.gguf_architectures import GgufArchitecture, Placement
from attn_models.weights.gguf_child import WeightDtype
from attn_models.weights.gguf_import import gguf_config, import_gguf_weights
from attn_models.weights.gguf_reader import GgufHeader, GgufTensor, read_gguf_header
from attn_models.weights.manifest import Verify, read_manifest, verify_manifest
from attn_models.weights.safetensors_files import LazyTensors, Nonfinite

__all__ = [
    "CheckpointFolder",
    "GgufArchitecture",
    "GgufHeader",
    "GgufTensor",
    "LazyTensors",
    "Nonfinite",
    "Placement",
    "Verify",
    "WeightDtype",
    "gguf_config",
    "import_gguf_weights",
    "read_folder",
    "read_gguf_header",
    "read_manifest",
    "staged_folder",
    "verify_manifest",
    "write_folder",
]
