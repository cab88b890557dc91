"""Convert models to fewer key/value heads, one latent in place of keys and values, or another mechanism."""

from attn_models.conversion.folders import Converted, convert_heads, convert_latent, convert_mechanism
from attn_models.conversion.heads import METHODS, HeadMap, Method, fewer_heads, pooled
from attn_models.conversion.latent import latent_attention
from attn_models.conversion.mechanism import other_mechanism

__all__ = [
    "METHODS",
    "Converted",
    "HeadMap",
    "Method",
    "convert_heads",
    "convert_latent",
    "convert_mechanism",
    "fewer_heads",
    "latent_attention",
    "other_mechanism",
    "pooled",
]
