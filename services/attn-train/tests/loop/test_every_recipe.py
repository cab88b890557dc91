"""Every recipe that comes along builds the model of its name, learns, and leaves a folder; no family is without one."""

from __future__ import annotations

import gzip
from itertools import product

import numpy as np
import pytest
from attn_cli.recipe import read_recipe, recipe_names
from attn_core import Capability, installed
from attn_models.adapters.bart import BartAdapter
from attn_models.adapters.family import FamilyAdapter
from attn_models.adapters.native import NativeAdapter
from attn_models.adapters.registry import ADAPTERS
from attn_models.export import export_model
from attn_models.loading import load_model
from attn_schema.codec import from_message, to_message
from attn_schema.training import TrainingConfig
from attn_train.admission import check_config
from attn_train.data.load import load_dataset
from attn_train.model import configured, model_of_shapes, resolved
from attn_train.records import StopFlag
from attn_train.trainer import Trainer
from attn_train.worker import build_model
from cases import each

SENTENCE = "1\tdogs\t_\tNOUN\t_\t_\t2\tnsubj\t_\t_\n2\trun\t_\tVERB\t_\t_\t0\troot\t_\t_\n\n"
DOOR_OF = {"deepseek": "deepseek_v3", "gemma3": "gemma3_text", "qwen3-next": "qwen3_next"}
WITHOUT = {NativeAdapter.model_type, "deepseek_v2", "t5", "mt5", "umt5", "whisper", "smolvlm", "idefics3"}
WITHOUT |= {name for name in ADAPTERS if isinstance(ADAPTERS[name], BartAdapter)}
"""Layouts that no recipe is named after: every decoder's, that of the model before DeepSeek-V3, and those of models
that are read and not trained anew."""
DESCRIBED = {name for name in ADAPTERS if isinstance(ADAPTERS[name], FamilyAdapter)}
"""Families that are read by a description; their parts are those of the recipes."""


@pytest.fixture
def files(tmp_path, words):
    """What a user has: a text, pairs of two languages, a treebank and images."""
    (tmp_path / "words.txt").write_text(words)
    for part, language in product(("train", "val"), ("en", "de")):
        (tmp_path / f"{part}.{language}").write_text("a dog runs\n" * 3)
    for part in ("train", "dev"):
        (tmp_path / f"x-{part}.conllu.gz").write_bytes(gzip.compress((SENTENCE * 4).encode()))
    pixels = np.random.default_rng(0).integers(0, 256, (20, 28 * 28), dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", x=pixels, y=np.arange(20, dtype=np.uint8) % 10)
    return tmp_path


def small(name, files):
    """The recipe's model, on little data and for two steps."""
    message = to_message(read_recipe(name))
    if "/" in message.data.dataset:
        message.data.dataset = str(files / "mnist.npz" if message.data.dataset.endswith(".npz") else files)
    elif message.data.dataset == "shakespeare":
        message.data.dataset = str(files / "words.txt")
    else:
        message.data.max_pairs = 0 if message.data.dataset in {"digits", "questions"} else 40
    message.optimizer.steps, message.optimizer.batch_size, message.optimizer.warmup_steps = 2, 2, 1
    message.evaluation.eval_batches, message.evaluation.bleu_sentences = 1, 0
    return resolved(from_message(TrainingConfig, message))


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_builds_its_model_learns_and_leaves_a_folder(name, files, record):
    config = small(name, files)
    check_config(config, home=files / "home")
    assert resolved(from_message(TrainingConfig, to_message(config))) == config
    dataset = load_dataset(config, files / "home", lambda _: None)
    model = build_model(config, dataset)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    report = record()
    assert Trainer(model, dataset, config).run(report, StopFlag()) is None
    assert report.losses[2] > 0
    assert any((before[name] != parameter).any() for name, parameter in model.named_parameters())
    folder = dataset.save(files / "model", model)
    assert (folder / "config.json").is_file()
    if config.model.family == "decoder":
        exported = export_model(folder, files / "exported")
        assert exported.layout == DOOR_OF.get(name, name if name in ADAPTERS else "llama")
        assert load_model(exported.path).config.vocab_size == model.vocab_size
        # transformers checks the types of fields, which are floats where a config came over the wire.
        assert (
            pytest.importorskip("transformers").AutoConfig.from_pretrained(exported.path).model_type == exported.layout
        )


CAUSAL = sorted(each.name for each in installed().mechanisms if each.can(Capability.CAUSAL))


@each("name", CAUSAL)
def test_every_causal_mechanism_stands_in_the_usual_decoder(name):
    config = resolved(TrainingConfig.from_mapping({"model": {"mechanism": name}, "data": {"dataset": "recall"}}))
    assert model_of_shapes(config.model, config.data).config.choice(0).mechanism.endswith(name)


def test_every_family_of_models_has_a_recipe():
    families = {read_recipe(name).model.family for name in recipe_names()}
    assert families == {family.name for family in installed().models} - {
        "deepseek_v4",
        "gemma4",
        "glm5_next",
        "minimax",
        "rwkv7",
        "t5",
    }  # they are read


@pytest.mark.parametrize("layout", sorted(ADAPTERS.keys() - WITHOUT - DESCRIBED))
def test_every_decoder_that_transformers_knows_has_a_recipe_that_it_could_read(layout):
    names = {DOOR_OF.get(name, name): name for name in recipe_names()}
    _, config = configured(read_recipe(names[layout]).model, {"vocab_size": 100})
    assert ADAPTERS[layout].to_hf_config(config)["model_type"] == layout
