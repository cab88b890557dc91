"""Vision-language models: a vision tower computes image embeddings, which replace image tokens in a prompt."""
