from broken.sound import Sound

from attn_testing import MechanismLaws


class TestSound(MechanismLaws):
    mechanism = Sound()
