"""Data that does not fit into memory: token shards on disk, their preparation, and the order of reading them."""
