import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_models.conversion import METHODS, HeadMap, convert_heads, fewer_heads, pooled
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model

TOKENS = torch.arange(24).view(2, 12) % 31
PLACES = {
    "learned": {"bias": True},
    "rotary": {"positions": "rotary", "norm": "rms", "feed_forward": "swiglu"},
}
MAPS = {
    "neighbours": (0, 0, 1, 1),
    "one": (0, 0, 0, 0),
    "crossed": (0, 1, 0, 1),
    "unequal": (0, 0, 0, 1),
}


def decoder(config, seed=0):
    torch.manual_seed(seed)
    model = Decoder(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def heads_alike(model, groups, heads=4):
    """The model, the keys and values of whose heads are alike within a group."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if ".attention.key." in name or ".attention.value." in name:
                rows = tensor.view(heads, -1, *tensor.shape[1:])
                for head, group in enumerate(groups):
                    rows[head] = rows[groups.index(group)]
    return model


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("groups", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("method", ["mean", "first"])
def test_where_the_heads_of_a_group_are_alike_nothing_changes(tiny, place, groups, method):
    model = heads_alike(decoder(tiny(**PLACES[place])), groups)
    converted, energy = fewer_heads(model, HeadMap(groups), method)
    assert converted.config.num_kv_heads == max(groups) + 1
    assert energy == pytest.approx(1, abs=1e-12)
    assert torch.allclose(converted(TOKENS), model(TOKENS), rtol=0, atol=1e-11)
    assert not torch.allclose(converted(TOKENS), decoder(tiny(**PLACES[place]), seed=1)(TOKENS), atol=1e-2)


def test_one_group_for_each_head_changes_nothing_at_all(tiny):
    model = decoder(tiny())
    converted, _ = fewer_heads(model, HeadMap((0, 1, 2, 3)), "mean")
    assert torch.equal(converted(TOKENS), model(TOKENS))


def test_heads_that_are_shared_already_can_be_shared_further(tiny):
    model = decoder(tiny(mechanism="gqa", num_kv_heads=2))
    with torch.no_grad():
        for block in model.blocks:
            for linear in (block.attention.key, block.attention.value):
                linear.weight[4:] = linear.weight[:4]
    converted, _ = fewer_heads(model, HeadMap((0, 0)), "mean")
    assert converted.blocks[0].attention.key.weight.shape == (4, 16)
    assert torch.allclose(converted(TOKENS), model(TOKENS), rtol=0, atol=1e-11)


def test_the_mean_is_the_nearest_that_one_head_can_be_to_all_of_its_group(tiny):
    model = decoder(tiny())
    kept = {method: fewer_heads(model, HeadMap((0, 0, 1, 1)), method)[1] for method in METHODS}
    assert kept["mean"] > kept["first"] > kept["random"] - 1
    weight, heads = torch.randn(8, 5, dtype=torch.float64), HeadMap((0, 1, 0, 1))
    mean = pooled(weight, heads, "mean", torch.Generator())
    by_head = weight.view(4, 2, 5)
    assert torch.equal(mean.view(2, 2, 5)[1], (by_head[1] + by_head[3]) / 2)
    assert torch.equal(pooled(weight, heads, "first", torch.Generator()), weight[:4])


def test_random_heads_forget_the_old_and_come_from_their_seed(tiny):
    model, heads = decoder(tiny(bias=True)), HeadMap((0, 0, 1, 1))
    one, again, other = (fewer_heads(model, heads, "random", seed=seed)[0] for seed in (3, 3, 4))
    key = [converted.blocks[0].attention.key for converted in (one, again, other)]
    assert torch.equal(key[0].weight, key[1].weight)
    assert not torch.equal(key[0].weight, key[2].weight)
    assert abs(key[0].weight.std().item() - 0.02) < 0.005
    assert not key[0].bias.any()
    assert torch.equal(one.blocks[0].attention.query.weight, model.blocks[0].attention.query.weight)


def test_a_windowed_model_keeps_its_window(tiny):
    model = heads_alike(decoder(tiny(mechanism="sliding_window", options={"window": 3})), (0, 0, 1, 1))
    converted, _ = fewer_heads(model, HeadMap((0, 0, 1, 1)), "mean")
    assert (converted.config.mechanism, converted.config.options) == ("sliding_window", {"window": 3})
    assert torch.allclose(converted(TOKENS), model(TOKENS), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("fields", "groups", "error"),
    [
        ({"mechanism": "linear"}, (0, 0, 1, 1), Incompatible),
        ({"mechanism": "sliding_window", "options": {"window": 3}}, (0, 0, 0, 1), Incompatible),
        ({}, (0, 0), InvalidValue),
    ],
)
def test_what_cannot_be_converted_is_refused(tiny, fields, groups, error):
    with pytest.raises(error):
        fewer_heads(decoder(tiny(**fields)), HeadMap(groups), "mean")


@pytest.mark.parametrize("groups", [(), (1, 1), (0, 2), (-1, 0)])
def test_a_map_with_gaps_is_refused(groups):
    with pytest.raises(InvalidValue):
        HeadMap(groups)


def test_heads_that_do_not_divide_need_a_map():
    with pytest.raises(InvalidValue, match="explicit map"):
        HeadMap.consecutive(4, 3)


@pytest.mark.parametrize(
    ("layout", "fields", "after"),
    [
        ("llama", PLACES["rotary"], "llama"),
        (
            "mistral",
            PLACES["rotary"] | {"mechanism": "sliding_window", "options": {"window": 5}},
            "mistral",
        ),
        ("gpt2", PLACES["learned"], "attn_decoder"),
    ],
)
def test_a_folder_keeps_its_layout_where_that_can_say_it(tiny, tmp_path, layout, fields, after):
    model = heads_alike(decoder(tiny(**fields)).float(), (0, 0, 1, 1))
    save_model(tmp_path / "before", model, layout=layout)
    converted = convert_heads(tmp_path / "before", tmp_path / "after", 2)
    assert (converted.layout, converted.loss_before) == (after, None)
    loaded = load_model(tmp_path / "after").model
    assert loaded.config.num_kv_heads == 2
    assert torch.allclose(loaded(TOKENS), model(TOKENS), rtol=0, atol=1e-4)


def test_unequal_groups_survive_a_folder(tiny, tmp_path):
    model = heads_alike(decoder(tiny(**PLACES["rotary"])).float(), (0, 0, 0, 1))
    save_model(tmp_path / "before", model, layout="llama")
    assert convert_heads(tmp_path / "before", tmp_path / "after", HeadMap((0, 0, 0, 1))).layout == "attn_decoder"
    loaded = load_model(tmp_path / "after").model
    assert torch.allclose(loaded(TOKENS), model(TOKENS), rtol=0, atol=1e-4)


@pytest.mark.oracle
def test_transformers_reads_what_was_converted_and_says_the_same(tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_model(tmp_path / "before", decoder(tiny(**PLACES["rotary"])).float(), layout="llama")
    convert_heads(tmp_path / "before", tmp_path / "after", HeadMap((0, 1, 0, 1)))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "after").eval()
    with torch.no_grad():
        assert torch.allclose(load_model(tmp_path / "after").model(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)
