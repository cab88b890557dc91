"""Decode steps over states in slots compute what is defined, and touch no other slot."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core.batch import SlotsInPlace
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrent_step import RecurrentStepSpec, recurrent_step_problem
from attn_kernels_triton.backends.recurrent_step import TritonRecurrentStep
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.recurrence import step
from attn_kernels_triton.recurrence.step import plan_of, run_step
from bounds import require_close
from step_definition import defined, drawn
from triton.runtime.errors import OutOfResources

SIZES = {"num_heads": 4, "num_key_heads": 4, "key_size": 12, "value_size": 20}
DELTA = {"taps": 4, "feature_map": "silu", "unit": True, "delta_rule": True, "norm_heads": 1}
SPECS = {
    "nothing fades": {},
    "linear": {"feature_map": "elu_plus_one", "normalizer": True},
    "a normalizer that fades": {"feature_map": "elu_plus_one", "normalizer": True, "decay": "head"},
    "retnet": {"rotary": "pairs", "decay": "head", "norm_heads": 1, "gate": "silu"},
    "halves turn, channels fade": {"rotary": "halves", "decay": "channel", "norm_heads": 1, "gate": "silu"},
    "lightning": {"feature_map": "silu", "decay": "head", "norm_heads": 4, "gate": "sigmoid"},
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
        monkeypatch.setattr(step, "UNEVEN", 0)
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


@pytest.mark.sweep(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_outputs_and_states_are_those_of_the_definition(name, dtype, divided):
    spec = spec_of(name)
    assert (plan_of(spec).columns < spec.value_size) == divided or not divided
    require_right(drawn(spec, dtype, SLOTS))


@pytest.mark.parametrize("name", ["linear", "kda", "mamba2"])
def test_float16_is_read_and_written_as_float32_rounds_to_it(name):
    require_right(drawn(spec_of(name), torch.float16, SLOTS))


@pytest.mark.parametrize("name", ["gla", "gated_deltanet"])
def test_parameters_and_kept_rows_may_be_of_another_type_than_the_rows(name):
    narrow, inputs = drawn(spec_of(name), torch.bfloat16, SLOTS), drawn(spec_of(name), torch.float32, SLOTS)
    rows = {part: getattr(narrow, part) for part in ("query", "key", "value")}
    require_right(dataclasses.replace(inputs, **rows))


@pytest.mark.parametrize("name", ["deltanet", "mamba2"])
def test_padding_that_shares_a_slot_changes_no_other(name):
    inputs = drawn(spec_of(name), torch.float32, [2, 6, 6, 6])
    alone = dataclasses.replace(
        drawn(spec_of(name), torch.float32, [2, 6, 6, 6]),
        **{part: getattr(inputs, part)[:1] for part in ("query", "key", "value")},
        state=SlotsInPlace({part: kept.clone() for part, kept in inputs.state.fields.items()}, torch.tensor([2])),
        decay=None if inputs.decay is None else inputs.decay._replace(rows=inputs.decay.rows[:1]),
        strength=None if inputs.strength is None else inputs.strength[:1],
        output=inputs.output if inputs.output.gate is None else inputs.output._replace(gate=inputs.output.gate[:1]),
    )
    assert torch.equal(run_step(inputs)[:1], run_step(alone))
    for part, kept in inputs.state.fields.items():
        assert torch.equal(kept[:6], alone.state.fields[part][:6])


@pytest.mark.parametrize("name", ["linear", "gla", "kda", "mamba2"])
def test_steps_go_on_where_the_last_one_stopped(name):
    spec, kept = spec_of(name), None
    for number in range(3):
        inputs = drawn(spec, torch.float32, [3, 1], seed=number)
        if kept is not None:
            inputs = dataclasses.replace(inputs, state=kept)
        exact = defined(inputs, torch.float64)
        out, kept = run_step(inputs), inputs.state
        for part, truth in exact.items():
            found = out if part == "out" else kept.fields[part]
            torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-5)


def test_log_decays_and_step_sizes_are_exact_where_they_are_small_and_where_they_are_large():
    spec = spec_of("mamba2", norm_heads=0, gate="none", taps=0, feature_map="none")
    inputs = drawn(spec, torch.float32, [0, 1, 2, 3, 4, 5])
    rows = torch.tensor([-60.0, -20.0, -7.0, 0.0, 20.0, 90.0])[:, None, None].expand(6, 4, 1).contiguous()
    nothing = inputs.decay._replace(rows=rows, rate=torch.full((4,), -30.0), bias=torch.zeros(4, 1))
    inputs = dataclasses.replace(inputs, decay=nothing)
    inputs.state.fields["S"].zero_()
    truth = defined(inputs, torch.float64)["S"]
    run_step(inputs)
    error = (inputs.state.fields["S"].double() - truth).abs() / truth.abs().clamp(min=1e-300)
    assert float(error.max()) < 1e-6


@pytest.fixture
def uncompilable_later(monkeypatch):
    """A chip for which the program that updates memories does not compile, but the one before it does."""
    run = Launch.run

    def refusing(self, device):
        if self.program.__name__ == "step_heads":
            raise OutOfResources(300_000, 232_448, "shared memory")
        run(self, device)

    monkeypatch.setattr(Launch, "run", refusing)
    monkeypatch.setattr(step, "_tried", set())


def test_what_does_not_compile_fails_before_any_state_has_changed(uncompilable_later):
    inputs = drawn(spec_of("mamba2"), torch.float32, SLOTS)
    before = {name: kept.clone() for name, kept in inputs.state.fields.items()}
    with pytest.raises(OutOfResources) as refused:
        run_step(inputs)
    assert TritonRecurrentStep().unsupported(refused.value) is not None
    assert all(torch.equal(kept, before[name]) for name, kept in inputs.state.fields.items())


REFUSED = {
    "rotary: ": {"rotary": "pairs", "taps": 4},
    "rotary: cannot follow": {"rotary": "halves", "feature_map": "silu"},
    "step_size: ": {"step_size": True, "decay": "channel", "decay_form": "softplus"},
    "normalizer: cannot be combined with delta_rule": {"normalizer": True, "delta_rule": True},
    "normalizer: cannot be combined with skip": {"normalizer": True, "skip": True},
    "normalizer: cannot be combined with norm_heads": {"normalizer": True, "norm_heads": 2},
    "norm_heads: ": {"norm_heads": 4, "value_size": 4096},
    "key_size: ": {"key_size": 300},
    "taps: ": {"taps": 9},
    "dtype: ": {"dtype": "float64"},
    "gradients: ": {"gradients": True},
    "device: ": {"device": "mps"},
}
"""What the programs do not compute."""


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_programs_do_not_compute_is_refused_with_the_reason(reason):
    call = {"dtype": "float32", "device": "cuda"} | {
        name: value for name, value in REFUSED[reason].items() if name in {"dtype", "device", "gradients"}
    }
    spec = RecurrentStepSpec(**{**SIZES, **{k: v for k, v in REFUSED[reason].items() if k not in call}})
    reasons = TritonRecurrentStep().refusals(recurrent_step_problem(spec, **call))
    assert any(said.startswith(reason) for said in reasons), reasons


@pytest.mark.parametrize("name", SPECS)
def test_all_that_layers_ask_is_accepted(name):
    for dtype in ("float32", "bfloat16", "float16"):
        problem = recurrent_step_problem(spec_of(name), dtype=dtype, device="cuda")
        assert TritonRecurrentStep().refusals(problem) == []


def changed(inputs, name: str, value):
    """The inputs with something else in one place, `convolution.starts` say."""
    first, _, rest = name.partition(".")
    if not rest:
        return dataclasses.replace(inputs, **{first: value})
    if first == "state":
        kept = inputs.state
        fields = kept.fields if rest == "slots" else {**kept.fields, rest: value}
        fields = {key: field for key, field in fields.items() if field is not None}
        return dataclasses.replace(inputs, state=SlotsInPlace(fields, value if rest == "slots" else kept.slots))
    return dataclasses.replace(inputs, **{first: getattr(inputs, first)._replace(**{rest: value})})


MISREAD = [
    ("query", torch.zeros(3, 4, 11), "query"),
    ("query", torch.zeros(3, 48), "query"),
    ("key", torch.zeros(3, 4, 12, dtype=torch.float64), "key.dtype"),
    ("key", torch.zeros(12, 3, 4).permute(1, 2, 0), "key.stride"),
    ("value", torch.zeros(3, 4, 20, device="meta"), "value.device"),
    ("value", torch.zeros(2, 4, 20), "value"),
    ("strength", None, "strength"),
    ("strength", torch.zeros(3, 2), "strength"),
    ("cos_sin", (torch.zeros(3, 1, 6), torch.zeros(3, 1, 6)), "cos_sin[0]"),
    ("decay", None, "decay.rows"),
    ("decay.rate", None, "decay.rate"),
    ("decay.bias", torch.zeros(4, 1), "decay.bias"),
    ("decay.rows", torch.zeros(2, 4, 12), "decay.rows"),
    ("convolution", None, "convolution.weight"),
    ("convolution.weight", torch.zeros(176, 3), "convolution.weight"),
    ("convolution.weight", torch.zeros(4, 176).T, "convolution.weight.stride"),
    ("convolution.bias", torch.zeros(175), "convolution.bias"),
    ("convolution.starts", (0, 40, 96), "convolution.starts"),
    ("output.norm", torch.zeros(21), "output.norm"),
    ("output.gate", None, "output.gate"),
    ("output.skip", torch.zeros(4), "output.skip"),
    ("state.S", torch.zeros(7, 4, 12, 21), "state.fields['S']"),
    ("state.S", torch.zeros(7, 4, 12, 20, dtype=torch.bfloat16), "state.fields['S']"),
    ("state.S", torch.zeros(7, 4, 20, 12).transpose(2, 3), "state.fields['S']"),
    ("state.tail", None, "state.fields"),
    ("state.tail", torch.zeros(7, 2, 176), "state.fields['tail']"),
    ("state.tail", torch.zeros(7, 3, 176, dtype=torch.int32), "state.fields['tail'].dtype"),
    ("state.slots", torch.zeros(2, dtype=torch.int64), "state.slots"),
    ("state.slots", torch.zeros(3, dtype=torch.int32), "state.slots"),
]
"""What is changed of a step of KDA, how, and the name that is said."""


@pytest.mark.parametrize(("name", "value", "named"), MISREAD, ids=[f"{case[0]} {i}" for i, case in enumerate(MISREAD)])
def test_tensors_that_programs_would_misread_are_refused_by_name(name, value, named):
    with pytest.raises(InvalidValue) as refused:
        run_step(changed(drawn(spec_of("kda"), torch.float32, SLOTS), name, value))
    assert refused.value.metadata["field"] == named


def test_angles_of_an_odd_number_of_elements_and_gates_apart_are_refused():
    turned = drawn(spec_of("retnet"), torch.float32, SLOTS)
    with pytest.raises(InvalidValue, match="even number"):
        run_step(dataclasses.replace(turned, cos_sin=(torch.zeros(3, 1, 5), torch.zeros(3, 1, 5))))
    together = drawn(spec_of("mamba2"), torch.float32, SLOTS)
    with pytest.raises(InvalidValue, match="contiguous heads"):
        run_step(changed(together, "output.gate", torch.zeros(3, 4, 40)[..., :20]))


def test_a_step_without_requests_is_empty():
    inputs = drawn(spec_of("kda"), torch.float32, [])
    assert run_step(inputs).shape == (0, 80)
