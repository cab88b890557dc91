"""The subcommands, by topic."""
