"""What holds for every call, as context managers around its handler: tokens, limits, measurements, errors."""
