"""Linear recurrences and kernel features."""
