"""Models that look at images."""
