"""Encoders: models that read a whole text or image at once and compute its representation."""
