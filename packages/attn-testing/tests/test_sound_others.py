"""The suites for caches, kernels and models run under pytest as a plugin's test file would run them."""

from broken.kernels import SoundKernel
from broken.models import SoundFamily
from broken.stores import SoundStore, StoreFamily

from attn_testing import CacheLaws, KernelLaws, ModelLaws


class TestSoundStore(CacheLaws):
    family = StoreFamily(SoundStore)


class TestSoundKernel(KernelLaws):
    kernel = SoundKernel()


class TestSoundModel(ModelLaws):
    family = SoundFamily()
    configs = {"small": {"vocab_size": 11, "hidden_size": 8}}
