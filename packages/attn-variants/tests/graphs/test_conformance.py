from attn_testing import MechanismLaws

STAR = [edge for place in range(64) for edge in ((0, place), (place, 0))]


class TestGraphOfAllPairs(MechanismLaws):
    mechanism = "gat"
    settings = ({"hidden_size": 16, "num_heads": 4}, {"hidden_size": 12, "num_heads": 3, "bias": True})


class TestStar(MechanismLaws):
    mechanism = "gat"
    options = {"edges": STAR}
    settings = ({"hidden_size": 16, "num_heads": 4},)


class TestMeanOfHeads(MechanismLaws):
    mechanism = "gat"
    options = {"merge": "mean", "slope": 0.0}
    settings = ({"hidden_size": 8, "num_heads": 2},)
