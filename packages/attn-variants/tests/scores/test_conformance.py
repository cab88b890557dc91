from attn_testing import MechanismLaws


class TestDot(MechanismLaws):
    mechanism = "dot"


class TestConcat(MechanismLaws):
    mechanism = "concat"
    options = {"intermediate_size": 5}


class TestCosine(MechanismLaws):
    mechanism = "cosine"


class TestLocation(MechanismLaws):
    mechanism = "location"


class TestLuong(MechanismLaws):
    mechanism = "luong"


class TestLuongWithLocationScores(MechanismLaws):
    mechanism = "luong"
    options = {"score": "location"}


class TestLocalM(MechanismLaws):
    mechanism = "local_m"
    options = {"radius": 2}


class TestLocalP(MechanismLaws):
    mechanism = "local_p"
    options = {"radius": 2, "score": "dot"}
