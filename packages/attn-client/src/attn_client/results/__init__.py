"""What calls return: frozen dataclasses, free of protobuf."""
