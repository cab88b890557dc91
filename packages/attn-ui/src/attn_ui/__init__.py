"""The pages of attn in a browser: files that a server hands out, and the attention explorer as one page of its own."""

from attn_ui.assets import Asset, assets
from attn_ui.explorer import AttentionPage, explore

__all__ = ["Asset", "AttentionPage", "assets", "explore"]
