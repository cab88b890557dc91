"""Whether and how a model would load, from its config and the headers of its files alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.errors import AttnError, CheckpointInvalid, Incompatible, Unauthenticated, Unavailable
from attn_core.states import state_bytes

from attn_models.sources import hub
from attn_models.sources.gguf_files import check_round_trip
from attn_models.sources.progress import silent
from attn_models.tokenizers import Tokenizer, tokenizer_from_gguf
from attn_models.weights import gguf_config, read_folder, read_gguf_header
from attn_models.weights.checkpoint_folder import CONFIG_NAME, CheckpointFolder, vocabulary_file
from attn_models.weights.gguf_import import placed_shards
from attn_models.weights.safe_files import read_config, refuse_code_format
from attn_models.weights.safetensors_files import TensorEntry

if TYPE_CHECKING:
    import torch

SIDE_LIMIT = 64 << 20
"""The largest file besides weights that is fetched to check a repository, in bytes."""
SAMPLE = 32 << 20
"""Numbers that are read to measure how fast memory is, 128 MB."""
CACHED = 1024


@dataclass
class ModelCheck:
    """What is known of a model before it is loaded; `refused` is the reason why it would not load.

    `route` says what builds it, `weight_bytes` are those of its files, `read_bytes` those that a token reads,
    `cache_bytes` those of the states of `CACHED` tokens in bfloat16, `embedding_rows` is the size of the embedding.
    None and 0 are unknown.
    """

    source: str
    family: str = ""
    route: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    read_bytes: int = 0
    cache_bytes: int = 0
    max_seq_len: int = 0
    embedding_rows: int | None = None
    tokenizer: str = ""
    remarks: list[str] = field(default_factory=list)
    refused: str | None = None

    def rows(self) -> dict[str, str]:
        """The facts for people, by name."""
        kinds = {"stored": self.weight_bytes, "bfloat16": 2 * self.parameters, "float32": 4 * self.parameters}
        weights = ", ".join(f"{_size(size)} as {kind}" for kind, size in kinds.items())
        rate = memory_rate() if self.read_bytes else 0.0
        fastest = f"{rate / max(1, self.read_bytes):.3g} tokens/s of one request"
        facts = {
            "loads": f"no: {self.refused}" if self.refused else f"yes, {self.route}",
            "family": self.family,
            "parameters": f"{self.parameters:,}" if self.parameters else "",
            "weights": weights if self.parameters else "",
            "cache": f"{self.cache_bytes / 1e6:.1f} MB for {CACHED:,} tokens in bfloat16" if self.cache_bytes else "",
            "context": f"{self.max_seq_len:,} tokens" if self.max_seq_len else "",
            "speed": f"at most {fastest}, as this CPU reads {_size(rate)}/s" if rate else "",
            "tokenizer": "; ".join(filter(None, (self.tokenizer, *self.remarks))),
        }
        return {name: said for name, said in facts.items() if said}


def check_model(source: str, found: Path | None) -> ModelCheck:
    """Check the model in a folder or GGUF file `found`, or if it is None in the repository `source` of a hub.

    What is wrong with the model is in the result; raises as `hub.look_up` for a repository that cannot be read.
    """
    checked = ModelCheck(source)
    try:
        if found is None:
            _check_repository(checked)
        elif found.is_file():
            _check_gguf(checked, found)
        else:
            _check_folder(checked, found)
    except (Unavailable, Unauthenticated):
        raise
    except AttnError as error:
        checked.refused = error.message
    return checked


class HeaderTensors(dict[str, Any]):
    """The tensors of files of which only the headers are known; all values read as zero."""

    device = "cpu"

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        import torch

        super().__init__(dict.fromkeys(entries, torch.zeros(())))
        self.entries = entries


def _check_folder(checked: ModelCheck, folder: Path) -> None:
    _describe(checked, read_folder(folder, verify="sizes"))
    _describe_tokenizer(checked, folder)


def _check_gguf(checked: ModelCheck, file: Path) -> None:
    refuse_code_format(file)
    header = read_gguf_header(file)
    tokenizer, config = tokenizer_from_gguf(header), gguf_config(header, "stored")
    placements, _ = placed_shards(header, "float32")
    sizes = {name: (placed.shape, header.tensors[placed.source]) for name, placed in placements.items()}
    entries = {name: TensorEntry("F32", shape, tensor.nbytes) for name, (shape, tensor) in sizes.items()}
    _describe(checked, _headers_only(file, config | {"quantization_config": None}, entries))
    checked.weight_bytes = checked.read_bytes = sum(tensor.nbytes for tensor in header.tensors.values())
    if tokenizer is not None:
        check_round_trip(tokenizer, file)
        _describe_tokenizer(checked, file, tokenizer)


def _check_repository(checked: ModelCheck) -> None:
    from attn_models.adapters.registry import require_known_family

    repository = hub.look_up(checked.source)
    names = hub.wanted_files(repository)
    if any(name.endswith(".gguf") for name in names):
        checked.weight_bytes = sum(repository.files[name].size for name in names)
        checked.route = "as far as the listing of its files says; attn pull fetches its GGUF file"
        return
    side = [name for name in names if not name.endswith(hub.WEIGHTS) and repository.files[name].size <= SIDE_LIMIT]
    with tempfile.TemporaryDirectory(prefix="attn-check-") as made:
        folder = Path(made)
        hub.fetch_files(repository, side, folder, silent)
        if not (folder / CONFIG_NAME).is_file():
            raise CheckpointInvalid.of(checked.source, f"has no {CONFIG_NAME}")
        config = read_config(folder / CONFIG_NAME)
        quantized = config.get("quantization_config") or {}
        if quantized.get("load_in_4bit") or quantized.get("quant_method") == "torchao":
            checked.family, checked.route = (
                str(config.get("model_type")),
                "as far as its config says; attn pull fetches it",
            )
            require_known_family(config.get("model_type"), config.get("requires"))
            return
        _describe(checked, _headers_only(folder, config, hub.headers_of(repository)))
        _describe_tokenizer(checked, folder)


def _headers_only(path: Path, config: dict[str, Any], entries: Mapping[str, TensorEntry]) -> CheckpointFolder:
    tensors: Any = HeaderTensors(entries)
    return CheckpointFolder(
        path=path, config=config, generation_config={}, tensors=tensors, tokenizer=None, verified=False
    )


def _describe(checked: ModelCheck, checkpoint: CheckpointFolder) -> None:
    """Fill in what config and headers say."""
    from attn_models.adapters.registry import through_transformers
    from attn_models.adapters.state_dict import require_fitting_tensors, saved_parameters
    from attn_models.loading.route import goes_on
    from attn_models.weights.quantized_tensors import with_plain_weights

    kind = checkpoint.config.get("family") or checkpoint.config.get("model_type")
    checked.family = str(kind).rpartition("/")[2]
    checked.weight_bytes = sum(entry.nbytes for entry in checkpoint.tensors.entries.values())
    if through_transformers(checkpoint.config):
        _describe_through_transformers(checked, checkpoint)
        return
    plain = with_plain_weights(checkpoint)
    try:
        model, layout = _described(plain)
    except (CheckpointInvalid, Incompatible) as refusal:
        with goes_on(checkpoint, refusal) as why:
            _describe_through_transformers(checked, checkpoint, f", as {why}")
        return
    require_fitting_tensors(plain, layout, saved_parameters(model))
    checked.route = "by its own layout"
    checked.max_seq_len = int(getattr(model, "max_seq_len", 0))
    _count(checked, model, decodes=hasattr(model, "state_specs"))
    if hasattr(model, "state_specs"):
        states = model.state_specs().values()
        checked.cache_bytes = sum(state_bytes(specs, tokens=CACHED, dtype="bfloat16") for specs in states)


def _describe_through_transformers(checked: ModelCheck, checkpoint: CheckpointFolder, why: str = "") -> None:
    """Fill in what transformers' class says; `why` it builds a model of a family that has a layout."""
    from attn_models.hf.causal import context_of
    from attn_models.hf.loading import empty_causal

    model = empty_causal(checkpoint.path, checkpoint.config)
    checked.route = f"through transformers ({type(model).__name__}){why}; its steps are compared when it is loaded"
    if getattr(model.config, "vision_config", None) is not None:
        checked.route += "; of text alone: images are refused"
    checked.max_seq_len = context_of(model.config)
    _count(checked, model, decodes=True)


def _described(checkpoint: CheckpointFolder) -> tuple[Any, Any]:
    """The model of a config without memory, and the layout of its tensors."""
    from attn_models.adapters.base import EncoderAdapter
    from attn_models.adapters.clip import ClipImageLayout
    from attn_models.adapters.hf_config import adapter_config
    from attn_models.adapters.registry import require_known_family
    from attn_models.adapters.state_dict import init_empty_weights
    from attn_models.encoder.clip import ClipImage
    from attn_models.loading.models import described_model

    found = require_known_family(checkpoint.config.get("model_type"), checkpoint.config.get("requires"))
    if isinstance(found, ClipImageLayout):
        tower = found.from_hf_config(checkpoint.config, checkpoint.path / CONFIG_NAME)
        with init_empty_weights():
            return ClipImage(tower), found.layout(tower)
    if not isinstance(found, EncoderAdapter):
        return described_model(checkpoint)[:2]
    config = adapter_config(found, checkpoint.config, checkpoint.path / CONFIG_NAME)
    with init_empty_weights():
        return found.build(config), found.layout(config)


def _count(checked: ModelCheck, model: torch.nn.Module, *, decodes: bool) -> None:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    checked.parameters, checked.embedding_rows = sum(sizes.values()), getattr(model, "vocab_size", None)
    experts = sum(size for name, size in sizes.items() if "experts." in name)
    config = getattr(model, "config", None)
    number, used = getattr(config, "num_experts", None), getattr(config, "num_experts_per_tok", None)
    idle = experts * (1 - used / number) if number and used else 0
    checked.read_bytes = int(checked.weight_bytes * (1 - idle / checked.parameters)) if decodes else 0


def _describe_tokenizer(checked: ModelCheck, path: Path, found: Tokenizer | None = None) -> None:
    if found is None and vocabulary_file(path) is not None:
        found = Tokenizer.from_folder(path, checked.embedding_rows)
    if found is not None:
        template = "with" if found.settings.chat_template else "without"
        checked.tokenizer = f"{found.vocab_size:,} tokens, {template} a chat template"
        checked.remarks = list(found.remarks)


def memory_rate() -> float:
    """Bytes a second that this CPU reads from memory, measured over 128 MB: the best of three."""
    import torch

    numbers = torch.ones(SAMPLE)
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - begun)
    return numbers.nbytes / min(times)


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
