"""The web pages of attn: the files that a server delivers, and the attention explorer as a standalone page."""

from attn_cli.pages.assets import Asset, assets
from attn_cli.pages.explorer import AttentionPage, explore

__all__ = ["Asset", "AttentionPage", "assets", "explore"]
