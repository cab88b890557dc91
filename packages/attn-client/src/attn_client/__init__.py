"""The Python client of attn, sync and asyncio. No torch."""
