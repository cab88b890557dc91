"""Programs for linear recurrences by chunks, and token by token."""
