"""The names of the tensors of a Qwen3-Next checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attn_models.families.door import Layout, Stored
from attn_models.families.llama import BLOCK, OUTSIDE

NAMES = {name: theirs for name, theirs in BLOCK.items() if not name.startswith("attention.")} | {
    "feed_forward.router.score": "mlp.gate",
    "feed_forward.shared_gate": "mlp.shared_expert_gate",
}
DELTA = {
    "attention.rate": "linear_attn.A_log",
    "attention.fade_bias": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.norm.weight",
    "attention.filters": "linear_attn.conv1d.weight",
    "attention.output.weight": "linear_attn.out_proj.weight",
}
SOFTMAX = {
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.norm.query_gain": "self_attn.q_norm.weight",
    "attention.norm.key_gain": "self_attn.k_norm.weight",
}
# Matrices of theirs that hold several of ours, a piece of each for every group of heads.
DELTA_JOINED = {
    "linear_attn.in_proj_qkvz.weight": ("query", "key", "value", "gate"),
    "linear_attn.in_proj_ba.weight": ("strength", "fade"),
}
SOFTMAX_JOINED = {"self_attn.q_proj.weight": ("query", "inner.gate")}
FILTERS = "attention.filters"
CENTRED = re.compile(r"norm\.weight|blocks\.\d+\.(\w+_norm\.weight|attention\.norm\.\w+_gain)")
FEED_FORWARD = re.compile(r"feed_forward\.(experts\.\d+\.|shared\.)?(gate|up|down)\.weight")


class Qwen3NextLayout(Layout):
    """Llama's names outside attention; gains are kept as their distance from one, but for those of Gated DeltaNet.

    `groups` are, for each layer, the groups in which joined matrices hold their parts: of a layer of softmax attention
    its heads, of one of Gated DeltaNet its key heads. Modules that predict later tokens are not read.
    """

    model_type = "qwen3_next"
    head = OUTSIDE["unembedding.weight"]
    derived = re.compile(r"rotary_emb\.inv_freq$|^mtp\.")

    def __init__(self, groups: Sequence[int]) -> None:
        self.groups = groups

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """One tensor for each parameter but those that are joined."""
        recurrent = {name.split(".")[1] for name in parameters if name.endswith(FILTERS)}
        found = []
        for name in parameters:
            below = 1.0 if CENTRED.fullmatch(name) else 0.0
            if name in OUTSIDE:
                found.append(Stored(OUTSIDE[name], (name,), below=below))
                continue
            _, layer, rest = name.split(".", 2)
            joined = self._joined(layer, rest, recurrent=layer in recurrent)
            if joined is not None:
                found += [joined] if joined.parts[0] == name else []
                continue
            theirs = (DELTA if layer in recurrent else SOFTMAX).get(rest) or _their_name(rest)
            single = rest == FILTERS
            found.append(Stored(f"model.layers.{layer}.{theirs}", (name,), below=below, single=single))
        return found

    def _joined(self, layer: str, rest: str, *, recurrent: bool) -> Stored | None:
        """The matrix of theirs that holds this parameter and others; None where there is none."""
        for theirs, names in (DELTA_JOINED if recurrent else SOFTMAX_JOINED).items():
            parts = [f"attention.{name}.weight" for name in names]
            if rest in parts:
                ours = tuple(f"blocks.{layer}.{part}" for part in parts)
                return Stored(f"model.layers.{layer}.{theirs}", ours, groups=self.groups[int(layer)])
        return None


def _their_name(rest: str) -> str:
    matrix = FEED_FORWARD.fullmatch(rest)
    if matrix is not None:
        return f"mlp.{(matrix[1] or '').replace('shared.', 'shared_expert.')}{matrix[2]}_proj.weight"
    module, _, leaf = rest.rpartition(".")
    return f"{NAMES.get(module, module)}.{leaf}"
