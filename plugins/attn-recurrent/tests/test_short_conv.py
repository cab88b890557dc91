import torch
from attn_core import configure
from attn_recurrent.short_conv import ShortConv
from attn_testing import Agreement, MechanismLaws
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv


class TestShortConv(MechanismLaws):
    mechanism = "short_conv"


class TestShortConvOfFiveTokens(MechanismLaws):
    mechanism = "short_conv"
    options = {"taps": 5}


def test_the_layer_and_its_gradient_are_those_of_lfm2(record_property):
    torch.manual_seed(0)
    settings = Lfm2Config(
        hidden_size=12, conv_L_cache=4, conv_bias=True, num_hidden_layers=1, num_attention_heads=2, layer_types=["conv"]
    )
    theirs, mechanism = Lfm2ShortConv(settings, 0), ShortConv()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ours = mechanism.build(configure(mechanism, {"taps": 4}, hidden_size=12, bias=True))
    ours.load_state_dict(
        {
            "input.weight": theirs.in_proj.weight,
            "input.bias": theirs.in_proj.bias,
            "filters": theirs.conv.weight[:, 0],
            "filter_bias": theirs.conv.bias,
            "output.weight": theirs.out_proj.weight,
            "output.bias": theirs.out_proj.bias,
        }
    )
    oracle = Agreement(record_property, "short_conv", package="transformers Lfm2ShortConv")
    oracle.functions(ours, theirs, torch.randn(2, 11, 12), tolerance=1e-5)
