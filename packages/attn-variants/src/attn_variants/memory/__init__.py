"""Attention over memories of its own making: tapes, slots that are written, windows of keys, compressed pasts."""
