"""SmolVLM and Idefics3 checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import Incompatible, InvalidValue

from attn_models.adapters.base import (
    ACTIVATIONS,
    HF_ACTIVATIONS,
    StateDictAdapter,
    StoredTensor,
    needed,
    require_allowed,
    required_count,
)
from attn_models.adapters.clip import stored_name
from attn_models.adapters.hf_config import adapter_config, check_unread_keys
from attn_models.adapters.llama import LlamaAdapter
from attn_models.vision_language.config import SiglipConfig, VisionDecoderConfig

if TYPE_CHECKING:
    from attn_models.vision_language.model import VisionDecoder

TOWER = {
    "hidden_size": ("hidden_size", 1152),
    "num_layers": ("num_hidden_layers", 12),
    "num_heads": ("num_attention_heads", 16),
    "intermediate_size": ("intermediate_size", 3072),
    "image": ("image_size", 224),
    "patch": ("patch_size", 32),
    "channels": ("num_channels", 3),
}
"""Fields of the tower, their keys, and transformers' defaults of missing keys."""
TOWER_KEYS = frozenset({key for key, _ in TOWER.values()}) | {"hidden_act", "layer_norm_eps", "attention_dropout"}
# Keys for resizing images, which the preprocessor config sets; transformers reads none of them in the tower.
UNUSED = frozenset({"max_image_size", "size", "use_base_siglip", "tie_word_embeddings"})
OUTSIDE = {
    "patches": "model.vision_model.embeddings.patch_embedding",
    "positions": "model.vision_model.embeddings.position_embedding",
    "norm": "model.vision_model.post_layernorm",
}
LAYERS = "model.vision_model.encoder.layers"
CONNECTOR = {"connector.weight": "model.connector.modality_projection.proj.weight"}


class SmolVlmAdapter(StateDictAdapter):
    """A SigLIP vision tower in front of a Llama (Marafioti et al. 2025, arXiv 2504.05299)."""

    model_type = "smolvlm"
    architecture: ClassVar[str] = "SmolVLMForConditionalGeneration"
    image_token: ClassVar[int] = 128257
    Config = VisionDecoderConfig
    head = LlamaAdapter.head
    derived_names = LlamaAdapter.derived_names
    known_keys = frozenset({"text_config", "vision_config", "image_token_id", "scale_factor", "tie_word_embeddings"})
    text = LlamaAdapter()

    def from_hf_config(self, values: Mapping[str, Any]) -> VisionDecoderConfig:
        """Build the model's config from a SmolVLMConfig whose language model is a Llama."""
        text, tower = _part(values, "text_config"), _part(values, "vision_config")
        tied = bool(values.get("tie_word_embeddings", False))
        require_allowed(text, {"model_type": ("llama", None), "tie_word_embeddings": (False, tied, None)})
        check_unread_keys(tower, TOWER_KEYS | UNUSED, Path("config.json"))
        require_allowed(tower, {"hidden_act": tuple(ACTIVATIONS), "attention_dropout": (0, 0.0, None)})
        sizes: dict[str, Any] = {ours: required_count(tower, key, default) for ours, (key, default) in TOWER.items()}
        vision = SiglipConfig(
            **sizes,
            feed_forward=ACTIVATIONS[tower.get("hidden_act", "gelu_pytorch_tanh")],
            norm_eps=tower.get("layer_norm_eps", 1e-6),
        )
        decoder = adapter_config(self.text, {**text, "tie_word_embeddings": tied}, Path("config.json"))
        image_token = required_count(values, "image_token_id", self.image_token, least=0)
        return VisionDecoderConfig.of(decoder, vision, image_token, required_count(values, "scale_factor", 2))

    def keys_of(self, config: VisionDecoderConfig) -> dict[str, Any]:
        """The keys of a SmolVLMConfig, as transformers 5 reads it; raises `Incompatible` for what it cannot express."""
        tower = config.vision
        if set(tower.mechanisms) != {SiglipConfig.mechanism} or tower.choice(0).options:
            raise Incompatible(f"mechanisms {tower.mechanisms} of a tower cannot be expressed in a config.json")
        text = self.text.keys_of(config.text)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "text_config": {key: value for key, value in text.items() if key != "architectures"},
            "vision_config": {
                **{key: getattr(tower, ours) for ours, (key, _) in TOWER.items()},
                "hidden_act": HF_ACTIVATIONS[tower.feed_forward],
                "layer_norm_eps": tower.norm_eps,
            },
            "image_token_id": config.image_token_id,
            "scale_factor": config.scale_factor,
            "tie_word_embeddings": config.tie_word_embeddings,
        }

    def build(self, config: VisionDecoderConfig) -> VisionDecoder:
        """Build a model with random weights."""
        from attn_models.vision_language.model import VisionDecoder

        return VisionDecoder(config)

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter."""
        return [StoredTensor(self.hf_name(name), (name,)) for name in parameters]

    def hf_name(self, ours: str) -> str:
        """The checkpoint's name of a model parameter."""
        if ours in CONNECTOR:
            return CONNECTOR[ours]
        if ours.startswith("vision."):
            return stored_name(ours.removeprefix("vision."), OUTSIDE, LAYERS)
        name = self.text.hf_name(ours)
        return name.replace("model.", "model.text_model.", 1) if name.startswith("model.") else name


class Idefics3Adapter(SmolVlmAdapter):
    """The same model under its first name (Laurençon et al. 2024, arXiv 2408.12637)."""

    model_type = "idefics3"
    architecture = "Idefics3ForConditionalGeneration"


def _part(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    given = needed(values, key)
    if not isinstance(given, Mapping):
        raise InvalidValue.of(key, given, "an object")
    return given
