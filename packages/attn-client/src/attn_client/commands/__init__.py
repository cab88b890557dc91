"""The commands that call a server, each in a file of its own."""
