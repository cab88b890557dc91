"""Models turned into models of other attention: fewer key/value heads, or one latent in their place."""

from attn_models.conversion.folders import Converted, convert_heads, convert_latent
from attn_models.conversion.groups import HeadMap
from attn_models.conversion.heads import fewer_heads
from attn_models.conversion.latent import latent_attention
from attn_models.conversion.pooling import METHODS, Method, pooled
from attn_models.conversion.text_loss import text_loss

__all__ = [
    "METHODS",
    "Converted",
    "HeadMap",
    "Method",
    "convert_heads",
    "convert_latent",
    "fewer_heads",
    "latent_attention",
    "pooled",
    "text_loss",
]
