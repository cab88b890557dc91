from attn_testing import MechanismLaws


class TestAlignment(MechanismLaws):
    mechanism = "alignment"
    options = {"hidden": 5}


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
