"""The mechanisms, one a file; none imports torch before a layer is built."""
