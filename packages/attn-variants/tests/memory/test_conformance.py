from attn_testing import MechanismLaws


class TestAlignment(MechanismLaws):
    mechanism = "alignment"
    options = {"intermediate_size": 5}


class TestSoftVisual(MechanismLaws):
    mechanism = "visual_soft"


class TestHardVisual(MechanismLaws):
    mechanism = "visual_hard"


class TestLstmn(MechanismLaws):
    mechanism = "lstmn"


class TestKeyValue(MechanismLaws):
    mechanism = "key_value"
    options = {"window": 3}


class TestKeyValuePredict(MechanismLaws):
    mechanism = "key_value_predict"
    options = {"window": 4}


class TestNtm(MechanismLaws):
    mechanism = "ntm"
    options = {"slots": 6}


class TestCompressive(MechanismLaws):
    mechanism = "compressive"
    options = {"segment": 4, "memory": 4, "compressed": 1, "rate": 2, "reconstruction": 0.5}


class TestCompressiveMeans(MechanismLaws):
    mechanism = "compressive"
    options = {"segment": 2, "memory": 4, "compressed": 2, "rate": 2, "pooling": "mean"}


class TestCompressiveDilated(MechanismLaws):
    mechanism = "compressive"
    options = {"segment": 4, "memory": 4, "compressed": 2, "rate": 2, "dilation": 3}


class TestMostUsed(MechanismLaws):
    mechanism = "most_used"
    options = {"segment": 4, "memory": 4, "compressed": 2, "rate": 2}


class TestCoverage(MechanismLaws):
    mechanism = "coverage"
