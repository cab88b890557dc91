"""The names of the tensors of a DeepSeek checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attn_models.families.door import Layout, Stored
from attn_models.families.llama import BLOCK, OUTSIDE

# Parts that lie in one matrix of theirs, by its name.
JOINED = {
    "self_attn.kv_a_proj_with_mqa": ("attention.latent", "attention.rotary_key"),
    "self_attn.kv_b_proj": ("attention.key_up", "attention.value_up"),
}
BY_HEAD = "self_attn.kv_b_proj"
NAMES = {
    "attention_norm": BLOCK["attention_norm"],
    "feed_forward_norm": BLOCK["feed_forward_norm"],
    "attention.query": "self_attn.q_proj",
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.output": "self_attn.o_proj",
    "feed_forward.router.score": "mlp.gate",
    "token_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "norm": "shared_head.norm",
}
COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
CORRECTION = "feed_forward.router.correction"
FEED_FORWARD = re.compile(r"feed_forward\.(experts\.\d+\.|shared\.)?(gate|up|down)")
LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DeepseekLayout(Layout):
    """Llama's names, with latents, the two halves of a head's expanded latent one after the other, and experts.

    Modules that predict later tokens stand behind the last of `layers`; so do copies of the embeddings for them.
    """

    model_type = "deepseek"
    head = OUTSIDE["unembedding.weight"]
    derived = re.compile(r"rotary_emb\.inv_freq$")

    def __init__(self, *, heads: int, layers: int, depth: int) -> None:
        self.heads, self.layers, self.depth = heads, layers, depth

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """One tensor for each parameter but those that are joined."""
        known, found = set(parameters), []
        parts = {part for joined in JOINED.values() for part in joined}
        for name in parameters:
            if name in OUTSIDE:
                found.append(Stored(OUTSIDE[name], (name,)))
                continue
            layer, rest = self._place(name)
            module, _, leaf = rest.rpartition(".")
            if rest == CORRECTION:
                found.append(Stored(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (name,), exact=True))
            elif module not in parts:
                found.append(Stored(f"model.layers.{layer}.{_their_module(module)}.{leaf}", (name,)))
            elif any(module == first for first, _ in JOINED.values()):
                found.append(self._joined(name, module, leaf))
        return [stored for stored in found if known.issuperset(stored.parts)]

    def derives(self, name: str) -> bool:
        """Also what predicts later tokens where it is not asked for, and copies of the embeddings."""
        layer = LAYER.match(name)
        behind = layer is not None and int(layer[1]) >= self.layers
        return super().derives(name) or (behind and (not self.depth or name.endswith(COPIES)))

    def _place(self, name: str) -> tuple[str, str]:
        """Their number of the layer that holds the parameter, and its name there."""
        kind, number, rest = name.split(".", 2)
        if kind == "blocks":
            return number, rest
        return str(self.layers + int(number)), rest.removeprefix("block.")

    def _joined(self, name: str, module: str, leaf: str) -> Stored:
        theirs, ours = next((theirs, ours) for theirs, ours in JOINED.items() if ours[0] == module)
        layer, before = self._place(name)[0], name.removesuffix(f"{module}.{leaf}")
        parts = tuple(f"{before}{part}.{leaf}" for part in ours)
        return Stored(f"model.layers.{layer}.{theirs}.{leaf}", parts, groups=self.heads if theirs == BY_HEAD else 1)


def _their_module(ours: str) -> str:
    matrix = FEED_FORWARD.fullmatch(ours)
    if matrix is None:
        return NAMES.get(ours, ours)
    where = (matrix[1] or "").replace("shared.", "shared_experts.")
    return f"mlp.{where}{matrix[2]}_proj"
