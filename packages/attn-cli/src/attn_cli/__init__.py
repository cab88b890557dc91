"""The `attn` command; installed packages add subcommands to it."""
