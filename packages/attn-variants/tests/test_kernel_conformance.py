from attn_testing import KernelLaws


class TestPlain(KernelLaws):
    kernel = "plain"


class TestTorchSdpa(KernelLaws):
    kernel = "torch_sdpa"
