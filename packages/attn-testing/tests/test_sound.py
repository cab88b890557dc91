from attn_testing import MechanismLaws
from attn_testing.broken.sound import Sound


class TestSound(MechanismLaws):
    mechanism = Sound()
