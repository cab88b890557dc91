"""Attention over e4m3 codes: what is checked, rounded and launched."""
