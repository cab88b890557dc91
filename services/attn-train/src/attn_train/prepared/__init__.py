"""Data that does not fit into memory: token shards on disk, how they are made, and the order in which they are read."""
