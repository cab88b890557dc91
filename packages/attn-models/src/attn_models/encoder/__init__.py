"""Encoders: models that read a whole text at once and give its representation."""
