"""Encoder-decoder models: they read a source and generate a sequence; the attention between both is chosen by name."""
