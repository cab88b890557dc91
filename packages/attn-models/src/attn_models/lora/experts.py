"""Experts as PEFT adapts them: transformers 5 stacks those of a layer in one parameter, which has no linear layers.

PEFT (0.21, `ParamWrapper`) adapts such a parameter by its name (`target_parameters`). With E experts and rank r, the
factors of expert e are rows e r to (e + 1) r of A [E r, inputs], but columns e, e + E, ... of B [outputs, r E].
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import torch
from attn_core.errors import Incompatible
from torch import Tensor
from torch.nn import functional

from attn_models.lora.sites import StoredModule

EXPERT = re.compile(r"(?P<block>.+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)\.(?P<matrix>\w+)")
GATE_UP, DOWN = "gate_up_proj", "down_proj"
MATRICES = {"gate_proj": GATE_UP, "up_proj": GATE_UP, "w1": GATE_UP, "w3": GATE_UP, "down_proj": DOWN, "w2": DOWN}
"""The stacked parameter of transformers 5 in which each matrix of an expert is, gates before the up projections."""
INNER = ".base_layer"
"""Precedes the tensors of a parameter in PEFT's files if a later parameter of the same module is adapted too."""


def stacked_experts(modules: Iterable[StoredModule]) -> list[StoredModule]:
    """The modules as transformers 5 has them: matrices of experts that a checkpoint stores one by one are stacked."""
    found: list[StoredModule] = []
    stacks: dict[str, dict[int, list[StoredModule]]] = {}
    for module in modules:
        expert = EXPERT.fullmatch(module.name)
        if expert is None or expert["matrix"] not in MATRICES:
            found.append(module)
            continue
        name = f"{expert['block']}.mlp.experts.{MATRICES[expert['matrix']]}"
        stacks.setdefault(name, {}).setdefault(int(expert["expert"]), []).append(module)
    order = list(MATRICES)
    for name, experts in stacks.items():
        own = [sorted(experts[n], key=lambda one: order.index(one.name.rpartition(".")[2])) for n in sorted(experts)]
        parts = tuple(part for matrices in own for one in matrices for part in one.parts)
        sizes = tuple(size for one in own[0] for size in one.sizes)
        found.append(StoredModule(name, parts, sizes, experts=len(own)))
    return found


def peft_names(modules: Iterable[StoredModule]) -> dict[str, StoredModule]:
    """The modules, all of which are adapted, by the names that precede their tensors in PEFT's files: parameters of
    the same module are nested, the down projections outside."""
    named: dict[str, StoredModule] = {}
    inside = {module.name.rpartition(".")[0] for module in modules if module.experts and module.name.endswith(DOWN)}
    for module in modules:
        owner, _, leaf = module.name.rpartition(".")
        nested = owner in inside and leaf != DOWN
        named[(owner + INNER * nested) if module.experts else module.name] = module
    return named


def parameter_of(module: StoredModule, modules: Iterable[StoredModule]) -> str | None:
    """The parameter by which PEFT must be told to adapt `module` of a model with `modules`; None for a linear layer.

    In a model with stacked experts, PEFT takes the names of their matrices for theirs alone, whatever precedes them.
    """
    if module.experts:
        return module.name
    shares_its_name = module.name.rpartition(".")[2] in MATRICES and any(one.experts for one in modules)
    return f"{module.name}.weight" if shares_its_name else None


def is_parameter(name: str, targets: Sequence[str]) -> bool:
    """Whether the parameter `name` is among PEFT's `target_parameters`: whole names, or their ends after a dot."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def stack(module: StoredModule, factors: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """PEFT's A and B of a stack from the A [rank, inputs] and B [outputs, rank] of each expert; lower ranks are padded
    with zeros."""
    _require_several(module)
    rank = max(len(a) for a, _ in factors)
    downs = torch.stack([functional.pad(a, (0, 0, 0, rank - len(a))) for a, _ in factors])
    ups = torch.stack([functional.pad(b, (0, rank - len(a))) for a, b in factors])
    if module.swapped:
        downs, ups = ups.mT, downs.mT
    return downs.flatten(0, 1), ups.permute(1, 2, 0).flatten(1)


def unstack(module: StoredModule, a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The A [rank, inputs] and B [outputs, rank] of each expert from PEFT's A and B of a stack."""
    _require_several(module)
    downs = a.reshape(module.experts, -1, a.shape[1])
    ups = b.reshape(len(b), -1, module.experts).permute(2, 0, 1)
    if module.swapped:
        downs, ups = ups.mT, downs.mT
    return list(zip(downs, ups, strict=True))


def _require_several(module: StoredModule) -> None:
    if module.experts == 1:
        # PEFT then forgets how the parameter is stored.
        raise Incompatible(f"adapter: {module.name} holds a single expert, which PEFT cannot adapt", field="adapter")


def shares(module: StoredModule) -> list[StoredModule]:
    """The matrices of each expert of a stack, as a module with the name of the stack."""
    each = len(module.sizes)
    parts = [module.parts[start : start + each] for start in range(0, len(module.parts), each)]
    return [dataclasses.replace(module, parts=part, experts=0) for part in parts]
