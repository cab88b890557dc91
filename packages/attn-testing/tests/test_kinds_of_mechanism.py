"""The kit serves every kind of state: source rows, fixed rows, remembered inputs."""

import torch
from attn_core import Capability, ComputedMechanism, Cost, Field, MechanismConfig, Slot
from attn_core.errors import InvalidValue
from broken.sound import VASWANI, Sound, SoundLayer
from broken.sources import Cross, Remembering
from torch import nn

from attn_testing import MechanismLaws

WIDTHS = [{"hidden_size": 8, "num_heads": 2}, {"hidden_size": 6, "num_heads": 1, "bias": True}]


class MeanLayer(nn.Module):
    """The mean of all rows so far, projected: what has a fixed state."""

    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.hidden_size, config.bias)

    def forward(self, query):
        counts = torch.arange(1, query.shape[1] + 1, dtype=query.dtype, device=query.device)
        return self.inner(query).cumsum(1) / counts[:, None]

    def step(self, query, batch, state):
        held = state["sums"].read()
        sums, counts, out = list(held["sum"]), list(held["count"]), []
        rows = self.inner(query)
        for span in batch.spans():
            for row in rows[span.start : span.stop]:
                sums[span.request] = sums[span.request] + row
                counts[span.request] = counts[span.request] + 1
                out.append(sums[span.request] / counts[span.request])
        state["sums"].write({"sum": torch.stack(sums), "count": torch.stack(counts)})
        return torch.stack(out)


class Mean(ComputedMechanism):
    name = "sound_mean"
    summary = "The mean of all values so far."
    paper = VASWANI
    equation = r"c_t = \frac{1}{t} \sum_{i \le t} W x_i"
    capabilities = frozenset({Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT, Capability.BIAS})

    def build(self, config: MechanismConfig):
        if config.rotary or not config.causal or config.num_kv_heads not in {None, config.num_heads}:
            raise InvalidValue.of("config", config, "a causal one of equal heads without rotary positions")
        return MeanLayer(config)

    def state(self, config):
        return {"sums": Slot({"sum": Field((config.hidden_size,)), "count": Field((), "int64")})}

    def cost(self, config, shape):
        flops = 2 * shape.batch * shape.query * config.hidden_size**2
        parameters = config.hidden_size**2 + config.hidden_size * config.bias
        return Cost(flops=flops, allowed_flops=flops, parameters=parameters)


class WholeSequences(SoundLayer):
    """The sound layer without its step."""

    @property
    def step(self):
        raise AttributeError("step")


class OnlyForward(Sound):
    name = "sound_replayed"
    layer = WholeSequences
    capabilities = Sound.capabilities - {Capability.INCREMENTAL}
    state = ComputedMechanism.state


class TestCrossAttention(MechanismLaws):
    mechanism = Cross()
    settings = WIDTHS


class TestMemoryBesideASource(MechanismLaws):
    mechanism = Remembering()
    settings = WIDTHS


class TestFixedState(MechanismLaws):
    mechanism = Mean()
    settings = WIDTHS


class TestReplay(MechanismLaws):
    mechanism = OnlyForward()
    settings = WIDTHS
