"""Convert models to other attention: fewer key/value heads, or one latent in place of keys and values."""

from attn_models.conversion.folders import Converted, convert_heads, convert_latent
from attn_models.conversion.heads import METHODS, HeadMap, Method, fewer_heads, pooled
from attn_models.conversion.latent import latent_attention

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
]
