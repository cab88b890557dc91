"""The gRPC interceptors around every call, one concern per file."""
