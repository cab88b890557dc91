"""BigBird checkpoints, as Hugging Face's transformers keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core.errors import Incompatible

from attn_models.decoder.config import AttentionChoice
from attn_models.encoder.block import attention_of
from attn_models.encoder.config import EncoderConfig
from attn_models.families.bert import READS, BertDoor

MECHANISM = "bigbird"
OWN = {"attention_type", "block_size", "num_random_blocks", "use_bias", "rescale_embeddings"}


class BigBirdDoor(BertDoor):
    """BERT whose blocks of tokens see neighbours, the first, the last, and random ones (Zaheer et al. 2020,
    arXiv 2007.14062).

    Random blocks are not part of a checkpoint: ours differ from theirs, as theirs do between training and evaluation
    (there all of them are block 0, which is then counted again).
    """

    model_type = "big_bird"
    architecture = "BigBirdModel"
    activation = "gelu_new"
    reads = READS | OWN
    said: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **BertDoor.said,
        "attention_type": ("block_sparse", "original_full"),
        "use_bias": (True,),
        "rescale_embeddings": (False,),
    }

    def attentions(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:
        """Blocks in every layer, or all tokens."""
        if values.get("attention_type") == "original_full":
            return super().attentions(values, layers)
        options = {"block": values.get("block_size", 64), "random": values.get("num_random_blocks", 3)}
        return (AttentionChoice(mechanism=MECHANISM, options=options),)

    def described_attentions(self, config: EncoderConfig) -> dict[str, Any]:
        """The blocks, which must be the same in every layer."""
        if set(config.mechanisms) != {MECHANISM}:
            return super().described_attentions(config) | {"attention_type": "original_full"}
        chosen: list[Any] = [attention_of(config, layer).config for layer in range(config.layers)]
        if len({(one.block, one.random) for one in chosen}) > 1 or any(one.seed is not None for one in chosen):
            raise Incompatible("blocks that differ between layers, and seeds, cannot be said in a big_bird config.json")
        return {
            "attention_type": "block_sparse",
            "block_size": chosen[0].block,
            "num_random_blocks": chosen[0].random,
        }
