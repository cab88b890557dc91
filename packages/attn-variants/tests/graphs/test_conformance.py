from attn_testing import MechanismLaws

STAR = [edge for place in range(64) for edge in ((0, place), (place, 0))]


class TestGraphOfAllPairs(MechanismLaws):
    mechanism = "gat"
    settings = ({"width": 16, "heads": 4}, {"width": 12, "heads": 3, "bias": True})


class TestStar(MechanismLaws):
    mechanism = "gat"
    options = {"edges": STAR}
    settings = ({"width": 16, "heads": 4},)


class TestMeanOfHeads(MechanismLaws):
    mechanism = "gat"
    options = {"merge": "mean", "slope": 0.0}
    settings = ({"width": 8, "heads": 2},)
