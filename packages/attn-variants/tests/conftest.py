import pytest
import torch
from attn_core import configure, installed


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def build():
    """Builds a float64 layer of a mechanism by name."""

    def build_layer(name, options=None, **shared):
        mechanism = installed().mechanisms.get(name)
        return mechanism.build(configure(mechanism, options, **shared)).double()

    return build_layer
