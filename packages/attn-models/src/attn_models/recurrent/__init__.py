"""Recurrent language models: LSTMs that attend to their past states, and the Neural Turing Machine."""
