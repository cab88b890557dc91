"""Captions of images in the batches of the engine: crowds, beams, and images that do not fit."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from attn_core import installed
from attn_engine import EngineConfig, Request, SamplingParams, build_engine

SIZES = {"vocab_size": 32, "max_seq_len": 24, "hidden_size": 8, "embedding": 8, "features": 8}
GRID = {"rows": 3, "columns": 4, "max_encoder_len": 13}


@cache
def model(mechanism):
    torch.manual_seed(3)
    family = installed().models.get("show_attend_tell")
    built = family.build(family.configure(SIZES | GRID | {"mechanism": mechanism})).double().eval()
    for name, parameter in built.named_parameters():
        if "convolutions" not in name:  # whose weights keep annotations about as large as they were
            torch.nn.init.normal_(parameter, std=0.1 if name == "embedding.weight" else 0.8)
    torch.nn.init.zeros_(built.unembedding.bias)
    return built


def asked(task):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(32, (8, 12), generator=generator).tolist()
    return [
        Request(id=f"r{n}", token_ids=(1, 5, 7)[: 1 + n % 3], encoder_token_ids=(*image, 2), params=task)
        for n, image in enumerate(images)
    ]


def served(engine, requests, every=0):
    """Texts as tokens by request and completion, and how each request ended."""
    made, ends, waiting, step = {}, {}, list(requests), 0
    while waiting or not engine.idle:
        if waiting and (every == 0 or step % every == 0):
            engine.submit(waiting.pop(0))
        for event in engine.step():
            made.setdefault((event.request_id, event.delta.index), []).extend(token.id for token in event.delta.tokens)
            if event.ended:
                ends[event.request_id] = event
        step += 1
    return made, ends


@pytest.mark.parametrize("mechanism", ["visual_soft", "visual_hard"])
@pytest.mark.parametrize(
    "task",
    [
        SamplingParams(max_new_tokens=7, ignore_eos=True),
        SamplingParams(max_new_tokens=5, temperature=0.0, num_beams=3),
    ],
    ids=["greedy", "beams"],
)
def test_a_crowd_gives_each_image_the_caption_it_gets_alone(mechanism, task):
    alone = {}
    for request in asked(task):
        alone |= served(build_engine(model(mechanism)), [request])[0]
    engine = build_engine(model(mechanism), config=EngineConfig(kv_cache="shared", max_num_seqs=6), kv_cache_tokens=128)
    made, ends = served(engine, asked(task), every=2)
    assert made == alone
    assert all(end.error is None for end in ends.values())
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_tokens_used) == (0, 0, 0)
    assert len({tuple(tokens) for tokens in made.values()}) > 4, "the images do not matter"


def test_an_image_that_is_not_the_grid_ends_its_own_request_and_says_what_one_is():
    engine = build_engine(model("visual_soft"))
    good, other = asked(SamplingParams(max_new_tokens=4, ignore_eos=True))[:2]
    bad = Request(id="bad", token_ids=(1,), encoder_token_ids=(4,) * 11, params=SamplingParams(max_new_tokens=4))
    made, ends = served(engine, [good, bad, other])
    assert len(made["r0", 0]) == len(made["r1", 0]) == 4
    assert "3 rows of 4 cells" in ends["bad"].error.message
