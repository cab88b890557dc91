"""The base of mechanisms."""

import subprocess
import sys

import pytest

from attn_core import Capability, ComputedMechanism, Field, MechanismConfig, Paged, Paper
from attn_core.errors import MechanismInvalid


class Replayed(ComputedMechanism):
    name = "replayed"
    summary = "for these tests"
    paper = Paper(title="None", authors="Nobody", year=2000, arxiv="1706.03762")
    equation = "x"
    capabilities = frozenset({Capability.CAUSAL})

    def build(self, config):
        raise NotImplementedError

    def cost(self, config, shape):
        raise NotImplementedError


def test_a_mechanism_without_a_step_remembers_its_inputs():
    assert Replayed().state(MechanismConfig(hidden_size=6)) == {"inputs": Paged({"x": Field((6,))})}


def test_a_mechanism_with_a_step_must_say_what_it_remembers():
    class Forgetful(Replayed):
        capabilities = frozenset({Capability.CAUSAL, Capability.INCREMENTAL})

    with pytest.raises(MechanismInvalid, match=r"'replayed' declares INCREMENTAL, but does not define state\(config\)"):
        Forgetful().state(MechanismConfig(hidden_size=6))


class Offering(Replayed):
    """Declares what it is given, and builds a layer with these methods."""

    def __init__(self, capabilities, methods):
        self.capabilities = frozenset(capabilities)
        self.methods = methods

    def build(self, config):
        return type("Layer", (), dict.fromkeys(self.methods, lambda *_given: None))()

    def state(self, config):
        return {}


@pytest.mark.parametrize(
    ("capabilities", "methods", "message"),
    [
        ((Capability.INCREMENTAL,), (), "declares INCREMENTAL, but its layer Layer has no method step"),
        ((Capability.WEIGHTS,), (), "declares WEIGHTS, but its layer Layer has no method weights"),
        ((Capability.SHARES_KV,), (), "declares SHARES_KV, but its layer Layer has no method project_kv"),
        ((Capability.INCREMENTAL, Capability.CROSS), ("step",), "has no method encode"),
        ((Capability.CAUSAL,), ("step",), "does not declare INCREMENTAL, but its layer Layer has a method step"),
    ],
)
def test_a_layer_that_is_not_what_its_mechanism_declares_is_refused(capabilities, methods, message):
    modes = {"causal": Capability.CAUSAL in capabilities, "cross": Capability.CROSS in capabilities}
    with pytest.raises(MechanismInvalid, match=message):
        Offering(capabilities, methods).build(MechanismConfig(hidden_size=6, **modes))


def test_a_replayed_mechanism_that_remembers_something_else_is_refused_with_the_states_and_their_shapes():
    class Other(Offering):
        def state(self, config):
            return {"kv": Paged({"key": Field((2, 3)), "value": Field((2, 3))})}

    message = r"its state is Paged 'kv' \(key \[2, 3\], value \[2, 3\]\), not Paged 'inputs' \(x \[6\]\)"
    with pytest.raises(MechanismInvalid, match=message):
        Other((Capability.CAUSAL,), ()).build(MechanismConfig(hidden_size=6))


def test_a_layer_that_is_what_its_mechanism_declares_is_built():
    every = Offering((Capability.INCREMENTAL, Capability.WEIGHTS), ("step", "weights"))
    assert every.build(MechanismConfig(hidden_size=6, causal=False)) is not None


def test_capabilities_are_asked_for_together():
    assert Replayed().can(Capability.CAUSAL)
    assert not Replayed().can(Capability.CAUSAL, Capability.WEIGHTS)


def test_a_paper_on_arxiv_has_a_page():
    assert Replayed.paper.url == "https://arxiv.org/abs/1706.03762"
    assert Paper(title="None", authors="Nobody", year=2000).url is None


def test_the_contract_imports_no_tensor_library():
    code = "import sys, attn_core; attn_core.installed(); print({'torch', 'numpy', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
