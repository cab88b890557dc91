"""Adapters that translate the config.json and tensor names of other libraries' checkpoints to attn's, and back."""
