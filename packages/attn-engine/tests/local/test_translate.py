"""`attn translate` and `attn generate --encoder-prompt` with a model that runs here."""

from __future__ import annotations

import json
import re
from itertools import product

import numpy as np
import pytest
import torch
from attn_cli.main import load
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_engine import LocalClient
from attn_models.loading import load_model, save_model
from attn_models.tokenizers.learned import word_tokenizer
from attn_models.tokenizers.tokenizer import encoder_input_ids
from attn_schema import Prompt, SamplingParams
from click.testing import CliRunner


def sourced(line):
    return Prompt.of("", encoder_prompt=line)


LINES = ["the dog sees the cat", "a cat runs", "the dog runs"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    tokenizer = word_tokenizer(["the a dog cat runs sees der die hund katze rennt sieht"])
    family = installed().models.get("rnnsearch")
    sizes = {"max_seq_len": 24, "max_encoder_len": 12, "hidden_size": 16, "embedding": 8, "maxout": 8}
    torch.manual_seed(4)
    model = family.build(family.configure(sizes | {"vocab_size": tokenizer.vocab_size}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    home = tmp_path_factory.mktemp("home")
    save_model(home / "models" / "searcher", model, tokenizer)
    return home


@pytest.fixture
def attn(shelf):
    def run(name, *words, text=""):
        environment = {"ATTN_HOME": str(shelf), "ATTN_ADDRESS": "127.0.0.1:1"}
        command = load(installed().commands.get(name))
        return CliRunner().invoke(command, words, input=text, env=environment, catch_exceptions=False)

    return run


def test_translations_are_ranked_by_their_probability_given_the_source(attn, shelf):
    source, texts = LINES[0], ["der hund sieht die katze", "katze rennt", "hund"]
    found = json.loads(attn("score", "--model", "searcher", *texts, "--encoder-prompt", source, "--json").stdout)
    loaded = load_model(shelf / "models" / "searcher")
    read = torch.tensor([encoder_input_ids(loaded.tokenizer, source)])
    for row in found:
        with LocalClient(shelf) as client:
            (score,) = client.score("searcher", [Prompt.of(row["text"], source)])
        ids = torch.tensor([token.id for token in score.tokens])
        with torch.inference_mode():
            logits = loaded.model(ids[None], read)[0].log_softmax(-1)
        expected = logits[:-1].gather(1, ids[1:, None]).sum().item()
        assert row["nats"] == pytest.approx(expected, rel=2e-6)
    assert sorted((row["nats"] for row in found), reverse=True) == [row["nats"] for row in found]
    other = json.loads(attn("score", "--model", "searcher", *texts, "--encoder-prompt", LINES[1], "--json").stdout)
    assert {row["text"]: row["nats"] for row in other} != {row["text"]: row["nats"] for row in found}


def test_each_line_is_translated_in_order_whatever_runs_beside_it(attn, shelf):
    with LocalClient(shelf) as client:
        greedy = SamplingParams(temperature=0, max_new_tokens=6)
        alone = [client.complete("searcher", sourced(line), greedy).text.strip() for line in LINES]
    assert len(set(alone)) == len(LINES)
    lines = [LINES[0], "", *LINES[1:]]
    done = attn("translate", "--model", "searcher", "-", "--max-new-tokens", "6", text="\n".join(lines))
    assert done.stdout.splitlines() == [alone[0], "", *alone[1:]]
    begun = attn(
        "generate", "--model", "searcher", "--encoder-prompt", LINES[0], "--temperature", "0", "--max-new-tokens", "6"
    )
    assert begun.stdout.strip() == alone[0]


def test_the_map_of_a_translation_has_its_own_words_down_and_the_source_across(attn, tmp_path):
    file = tmp_path / "translation.html"
    words = attn(
        "translate", "--model", "searcher", LINES[0], "--max-new-tokens", "4", "--map", str(file)
    ).stdout.split()
    (data,) = re.findall(r"<script type='application/json' id='views'>(.*)</script>", file.read_text("utf-8"))
    (layer,) = json.loads(data)["views"][0]["layers"]
    assert layer["cross_attention"]
    assert [text.strip() for text in layer["query_tokens"]][: len(words)] == words
    assert [text.strip() for text in layer["key_tokens"]] == [*LINES[0].split(), "</s>"]
    attn("translate", "--model", "searcher", LINES[0], "--map", str(file.with_suffix(".png")))
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_transformer_has_one_map_for_each_block_that_reads_the_source(tmp_path):
    tokenizer, family = word_tokenizer([" ".join(LINES)]), installed().models.get("transformer")
    sizes = {
        "max_seq_len": 24,
        "max_encoder_len": 12,
        "hidden_size": 16,
        "num_heads": 2,
        "vocab_size": tokenizer.vocab_size,
    }
    kinds = {"cross": "luong", "num_layers": 3, "intermediate_size": 16}
    save_model(tmp_path / "models" / "three", family.build(family.configure(sizes | kinds)), tokenizer)
    with LocalClient(tmp_path) as client:
        maps = client.attention_maps("three", sourced(LINES[0]))
    assert [(each.layer, each.mechanism.rpartition("/")[2]) for each in maps] == [(n, "luong") for n in range(3)]
    rows = np.frombuffer(maps[-1].attention_weights.data, np.float32).reshape(maps[-1].attention_weights.shape).sum(-1)
    np.testing.assert_allclose(rows, 1, atol=1e-5)


def test_words_that_the_model_does_not_know_are_named_and_the_others_translated(attn, shelf):
    done = attn("translate", "--model", "searcher", "-", text="the zebra sees a cat\n\na yak runs\nthe zebra runs\n")
    assert len(done.stdout.splitlines()) == 4
    assert "'zebra', 'yak'" in done.stderr
    assert "searcher" in done.stderr
    quiet = attn("translate", "--model", "searcher", "-", text="\n".join(LINES))
    assert quiet.stderr == "attn: loading searcher ...\n"
    with LocalClient(shelf) as client:
        assert client.tokenize("searcher", sourced("a yak, no cat")).unknown == ("yak,", "no")


def test_beams_find_what_is_likelier_than_the_likeliest_words(attn, shelf):
    lines = [" ".join(words) for words in product(["a", "dog", "cat", "runs", "sees"], repeat=2)]
    words = ("translate", "--model", "searcher", "-", "--max-new-tokens", "5")
    found = attn(*words, "--num-beams", "5", "--length-penalty", "0", text="\n".join(lines)).stdout.splitlines()
    assert found != attn(*words, text="\n".join(lines)).stdout.splitlines()
    with LocalClient(shelf) as client:
        scores = []
        for chosen in (SamplingParams(num_beams=5, length_penalty=0), SamplingParams(temperature=0)):
            sampling = chosen.replace(max_new_tokens=5, top_logprobs=0)
            written = [client.complete("searcher", sourced(line), sampling) for line in lines]
            scores.append([sum(token.logprob for token in each.tokens) for each in written])
            if chosen.num_beams > 1:
                assert [each.text.strip() for each in written] == found
    assert sum(scores[0]) > sum(scores[1])


def test_bleu_is_sacrebleus(attn, tmp_path):
    from sacrebleu.metrics import BLEU

    text = "\n".join(LINES)
    ours = attn("translate", "--model", "searcher", "-", text=text).stdout.splitlines()
    file = tmp_path / "references"
    file.write_text("\n".join(ours))
    done = attn("translate", "--model", "searcher", "-", "--references", str(file), text=text)
    assert done.stderr.splitlines()[1].startswith("BLEU 100.00 (nrefs:1|case:mixed")
    others = [ours[0], "x y z w v", ours[2]]
    file.write_text("\n".join(others))
    told = json.loads(
        attn(
            "translate", "--model", "searcher", "-", "--references", str(file), "--json", text=text
        ).stdout.splitlines()[-1]
    )
    assert told["bleu"] == pytest.approx(BLEU().corpus_score(ours, [others]).score)


def test_bad_input_is_named(attn, tmp_path):
    file = tmp_path / "references"
    file.write_text("one\ntwo")
    for words, said in (
        (("--model", "searcher", "the dog", "--references", str(file)), "as many as the 1 lines"),
        (("--model", "searcher", "the dog", "--references", str(tmp_path / "none")), "a readable file"),
        (("the dog",), "a server's model and a text"),
        (("--model", "searcher", "the dog\na cat", "--map", str(tmp_path / "x.png")), "one line"),
        (("--model", "searcher", "the " * 40), "at most 12 tokens"),
        (("--model", "searcher", "the dog", "--num-beams", "0"), "a whole number from 1 to 64"),
        (("--model", "searcher", "the dog", "--num-beams", "2", "--length-penalty", "nan"), "-10 to 10"),
    ):
        with pytest.raises(InvalidValue, match=said):
            attn("translate", *words)
    with pytest.raises(InvalidValue, match="without --chat"):
        attn("generate", "--model", "searcher", "--encoder-prompt", "the dog", "--chat")
    with pytest.raises(InvalidValue, match="at least one token"):
        attn("generate", "--model", "searcher", "--encoder-prompt", " ")
