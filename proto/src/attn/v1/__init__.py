"""The wire format of attn, version 1: generated message, stub and servicer modules."""
