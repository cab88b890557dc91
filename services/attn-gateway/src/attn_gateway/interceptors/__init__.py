"""What happens to every call on its way to a handler and back; one concern a file."""
