"""The layers of linear recurrences."""
