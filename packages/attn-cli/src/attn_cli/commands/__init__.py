"""The subcommands, by what they are about."""
