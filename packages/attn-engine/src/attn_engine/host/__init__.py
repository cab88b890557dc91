"""Hosts a loaded model with its engine or encoder in process, with an API in the types of attn-schema; no network."""
