"""The state of one request as bytes, the same whatever kind of store wrote them."""
