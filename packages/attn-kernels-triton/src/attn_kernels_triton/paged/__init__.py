"""Attention to rows where a cache keeps them: what is checked, cut into items and launched."""
