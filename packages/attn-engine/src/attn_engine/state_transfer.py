"""Disaggregated prefill: prompts that one engine computes and another one completes.

A long prompt delays the next token of every other request in its batch. If some engines compute prompts and others
decode, the state of a request (keys and values in any layout, latents, sums of fixed size) is exported from the first
engine after all tokens of the prompt but the last, and the second engine continues as if it had computed them (Zhong et
al. 2024, "DistServe", arXiv 2401.09670; Patel et al. 2024, "Splitwise", arXiv 2311.18677).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b

from attn_core.errors import Incompatible
from attn_core.stores import PortableStore, StateStore

DIGEST_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class PromptState:
    """The state of a request after its first `tokens` tokens, for another engine of the same model and cache.

    `exported` is what `PortableStore.export` wrote, which does not identify the tokens; `digest` does
    (`prompt_digest`). `cached_tokens` of them were found in the prefix cache of the engine that computed the state, on
    the chip and with the weights and cache that `computed_on` names.
    """

    exported: bytes
    tokens: int
    digest: bytes
    cached_tokens: int = 0
    computed_on: str = ""

    def without_bytes(self) -> PromptState:
        """The same, with nothing in `exported`."""
        return replace(self, exported=b"")


def prompt_digest(tokens: Iterable[int], beside: str) -> bytes:
    """A digest of the tokens and of the other inputs, `beside` (`Request.beside_tokens`), that determine a state."""
    found = blake2b(digest_size=DIGEST_BYTES)
    for part in (array("q", tokens).tobytes(), beside.encode()):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def require_portable(store: StateStore) -> PortableStore:
    """Return the store as a `PortableStore`; raises `Incompatible` if it cannot export and restore requests."""
    if not isinstance(store, PortableStore):
        raise Incompatible(
            f"the engine's cache ({type(store).__name__}) cannot export or restore the state of a prompt"
        )
    return store
