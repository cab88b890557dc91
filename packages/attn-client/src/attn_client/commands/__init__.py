"""The commands that talk to a server; one a file."""
