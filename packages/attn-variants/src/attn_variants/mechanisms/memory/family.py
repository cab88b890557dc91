"""The mechanisms of this folder."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.memory.alignment import Alignment
from attn_variants.mechanisms.memory.compressive import CompressiveMemory
from attn_variants.mechanisms.memory.key_value import KeyValue, KeyValuePredict
from attn_variants.mechanisms.memory.lstmn import LongShortTermMemoryNetwork
from attn_variants.mechanisms.memory.ntm import NeuralTuringMachine
from attn_variants.mechanisms.memory.visual_hard import HardVisual
from attn_variants.mechanisms.memory.visual_soft import SoftVisual


def memories() -> list[Mechanism]:
    """One of each."""
    return [
        Alignment(),
        SoftVisual(),
        HardVisual(),
        CompressiveMemory(),
        LongShortTermMemoryNetwork(),
        NeuralTuringMachine(),
        KeyValue(),
        KeyValuePredict(),
    ]
