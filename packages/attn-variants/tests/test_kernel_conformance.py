from attn_testing import KernelLaws


class TestPlain(KernelLaws):
    kernel = "plain"


class TestTorchSdpa(KernelLaws):
    kernel = "torch_sdpa"


class TestBlockSparse(KernelLaws):
    kernel = "block_sparse"


class TestBanded(KernelLaws):
    kernel = "banded"
