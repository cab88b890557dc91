from functools import partial

import pytest
import torch
from attn_core import configure, installed
from attn_testing import Agreement


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


@pytest.fixture
def agrees(record_property):
    """Compares a mechanism with an oracle, and keeps the errors for docs/proof.md."""
    return partial(Agreement, record_property)
