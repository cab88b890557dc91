"""The web pages of attn: the files that a server delivers, and the attention explorer as a standalone page."""

from attn_ui.assets import Asset, assets
from attn_ui.explorer import AttentionPage, explore

__all__ = ["Asset", "AttentionPage", "assets", "explore"]
