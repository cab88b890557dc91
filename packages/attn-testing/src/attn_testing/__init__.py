"""The conformance kit: laws that a mechanism, kernel, cache or model must keep."""
