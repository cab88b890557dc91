import subprocess
import sys

import pytest
from attn_core import Capability, MechanismConfig, Shape, configure, installed
from attn_variants import plugin


def test_listing_mechanisms_and_kernels_imports_no_torch():
    program = (
        "import sys; from attn_variants import plugin; plugin.attn_mechanisms(); plugin.attn_kernels();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_everything_offered_is_found_through_the_catalogue_by_its_name():
    catalog = installed()
    for offered, registry in ((plugin.attn_mechanisms(), catalog.mechanisms), (plugin.attn_kernels(), catalog.kernels)):
        for item in offered:
            assert type(registry.get(f"attn-variants/{item.name}")) is type(item)


def test_every_declared_mechanism_can_be_priced_described_and_located_without_torch():
    program = (
        "import sys\n"
        "from attn_core import Capability, Shape, configure\n"
        "from attn_variants import plugin\n"
        "for mechanism in plugin.attn_mechanisms():\n"
        "    causal = mechanism.can(Capability.CAUSAL)\n"
        "    config = configure(mechanism, hidden_size=64, num_heads=4, causal=causal)\n"
        "    mechanism.spec(config), mechanism.state(config), mechanism.cost(config, Shape(query=8, key=8))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("mechanism", plugin.attn_mechanisms(), ids=lambda mechanism: mechanism.name)
def test_a_config_without_the_options_means_their_defaults(mechanism):
    sizes = {"hidden_size": 64, "num_heads": 4, "causal": mechanism.can(Capability.CAUSAL)}
    bare, said = MechanismConfig(**sizes), configure(mechanism, **sizes)
    assert mechanism.state(bare) == mechanism.state(said)
    assert mechanism.cost(bare, Shape(query=8, key=8)) == mechanism.cost(said, Shape(query=8, key=8))
