"""Decode steps over states in slots compute what is defined, and touch no other slot."""

from __future__ import annotations

import pytest
import torch
from attn_core.kernels.recurrent_step import RecurrentStepSpec
from attn_kernels_triton.recurrence import step
from attn_kernels_triton.recurrence.step import plan_of, run_step
from bounds import require_close
from step_definition import defined, drawn

SIZES = {"num_heads": 4, "num_key_heads": 4, "key_size": 12, "value_size": 20}
DELTA = {"taps": 4, "feature_map": "silu", "unit": True, "delta_rule": True, "norm_heads": 1}
SPECS = {
    "nothing fades": {},
    "linear": {"feature_map": "elu_plus_one", "normalizer": True},
    "a normalizer that fades": {"feature_map": "elu_plus_one", "normalizer": True, "decay": "head"},
    "retnet": {"rotary": "pairs", "decay": "head", "norm_heads": 1, "gate": "silu"},
    "halves turn, channels fade": {"rotary": "halves", "decay": "channel", "norm_heads": 1, "gate": "silu"},
    "lightning": {"feature_map": "silu", "decay": "head", "norm_heads": 4},
    "gla": {"decay": "channel", "decay_form": "log_sigmoid", "norm_heads": 1, "gate": "silu"},
    "deltanet": DELTA,
    "deltanet without a convolution": {**DELTA, "taps": 0},
    "one tap": {**DELTA, "taps": 1},
    "three taps": {**DELTA, "taps": 3},
    "kda": {**DELTA, "decay": "channel", "decay_form": "softplus", "gate": "sigmoid"},
    "gated_deltanet": {**DELTA, "num_key_heads": 2, "decay": "head", "decay_form": "softplus", "gate": "silu"},
    "mamba2": {
        "num_key_heads": 2,
        "taps": 4,
        "feature_map": "silu",
        "decay": "head",
        "decay_form": "softplus",
        "step_size": True,
        "skip": True,
        "norm_heads": 2,
        "gate": "silu",
        "norm_before_gate": False,
    },
}
"""What layers ask for, and more."""
SLOTS = [5, 0, 3]


def spec_of(name: str, **more) -> RecurrentStepSpec:
    return RecurrentStepSpec(**{**SIZES, **SPECS[name], **more})


@pytest.fixture(params=["whole", "divided"])
def divided(request, monkeypatch):
    """Programs that hold whole memories, or parts of 16 columns, whose sums another program finishes."""
    if request.param == "divided":
        monkeypatch.setattr(step, "WHOLE", 0)
        monkeypatch.setattr(step, "PART", 16 * 16)
    return request.param == "divided"


def require_right(inputs) -> None:
    """Fail unless outputs and states are nearly as close to float64 as those of the definition in float32."""
    exact, plain = defined(inputs, torch.float64), defined(inputs, torch.float32)
    untouched = sorted(set(range(len(inputs.state.fields["S"]))) - set(inputs.state.slots.tolist()))
    before = {name: field[untouched].clone() for name, field in inputs.state.fields.items()}
    found = {"out": run_step(inputs), **inputs.state.fields}
    for name, truth in exact.items():
        kind = found[name].dtype
        require_close(found[name], plain[name].to(kind), truth, name, 8 if kind == torch.float32 else 2)
    for name, rows in before.items():
        assert torch.equal(inputs.state.fields[name][untouched], rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_outputs_and_states_are_those_of_the_definition(name, dtype, divided):
    spec = spec_of(name)
    assert (plan_of(spec).columns < spec.value_size) == divided or not divided
    require_right(drawn(spec, dtype, SLOTS))
