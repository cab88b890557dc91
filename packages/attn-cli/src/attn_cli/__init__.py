"""The attn command; its subcommands appear as packages are installed."""
