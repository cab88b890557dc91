"""Models built from attention mechanisms by name; weights from safetensors and GGUF; tokenizers."""
