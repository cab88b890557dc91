from attn_testing import MechanismLaws


class TestGatedDeltaNet(MechanismLaws):
    mechanism = "gated_deltanet"


class TestGatedDeltaNetWithWideValuesAndOneTap(MechanismLaws):
    mechanism = "gated_deltanet"
    options = {"value_size": 6, "taps": 1}


class TestGatedDeltaNetWithTwoHeadsForEachKey(MechanismLaws):
    mechanism = "gated_deltanet"
    options = {"key_heads": 2, "value_size": 6, "allow_neg_eigval": True}


class TestGatedDeltaProduct(MechanismLaws):
    mechanism = "gated_deltaproduct"
    options = {"num_householder": 3, "key_heads": 2, "value_size": 6, "chunk": 128}


class TestComba(MechanismLaws):
    mechanism = "comba"
    options = {"key_heads": 2, "value_size": 6}


class TestGatedDeltaNet2(MechanismLaws):
    mechanism = "gated_deltanet2"
    options = {"key_heads": 2, "value_size": 6, "rank": 3, "allow_neg_eigval": True}


class TestPrecondDeltaNet(MechanismLaws):
    mechanism = "precond_deltanet"
    options = {"key_heads": 2, "value_size": 6, "allow_neg_eigval": True}


class TestPrecondKda(MechanismLaws):
    mechanism = "precond_kda"
    options = {"key_heads": 2, "value_size": 6, "rank": 3, "allow_neg_eigval": True}


class TestMomentumDeltaNet(MechanismLaws):
    mechanism = "momentum_deltanet"
    options = {"key_heads": 2, "value_size": 6}


class TestMesaNet(MechanismLaws):
    mechanism = "mesa_net"
    options = {"key_heads": 2, "value_size": 6, "chunk": 128}
