"""Block-sparse attention: tiles of queries and the keys that they see."""
