"""Models that read a source and write a sequence: an encoder, a decoder, and attention between them by name."""
