"""What `attn explain` says computes a mechanism is what computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_cli.facts import verdicts
from attn_core import Capability, Mechanism, MechanismConfig, configure, installed
from attn_core.computation import WholeCall
from cases import each

TOKENS = 64
FEWER: dict[str, dict[str, Any]] = {
    "bigbird": {"block": 4, "random": 1},
    "dsa": {"top": 8},
    "longformer": {"window": 8},
    "moba": {"block": 16},
    "nsa": {"window": 8},
    "sliding_window": {"window": 8},
}
"""Options with which a query reads few of the tokens."""
CASES = [
    *((mechanism, {}) for mechanism in installed().mechanisms),
    *((installed().mechanisms.get(name), own) for name, own in FEWER.items()),
]


def config_of(mechanism: Mechanism, options: dict[str, Any]) -> MechanismConfig:
    return configure(mechanism, options, hidden_size=16, num_heads=2, causal=mechanism.can(Capability.CAUSAL))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that have computed something."""
    found: set[str] = set()
    for kernel in installed().kernels:
        for method in ("run", "read"):
            compute = getattr(kernel, method, None)
            if compute is not None:
                monkeypatch.setattr(kernel, method, noting(found, kernel.name, compute))
    return found


def noting(found: set[str], name: str, compute: Any) -> Any:
    def run(*given: Any) -> Any:
        found.add(name)
        return compute(*given)

    return run


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "gradients"])
@each("mechanism,options", CASES)
def test_the_kernels_said_to_run_are_those_that_run(
    mechanism: Mechanism, options: dict[str, Any], gradients: bool, used: set[str]
) -> None:
    """A layer asks the kernels that `attn explain` names, and no others."""
    used.clear()
    config = config_of(mechanism, options)
    rows = verdicts(mechanism, config, WholeCall(dtype="float32", gradients=gradients, tokens=TOKENS))
    names = set(installed().kernels.names())
    said = {row["name"] for row in rows if row["verdict"] == "runs"}
    layer = mechanism.build(config).eval()
    query = torch.randn(1, TOKENS, config.hidden_size)
    source = torch.randn(1, TOKENS, config.hidden_size) if config.cross else None
    with torch.set_grad_enabled(gradients):
        layer(query, source)
    assert used == said & names
    assert used or "its own module" in said
