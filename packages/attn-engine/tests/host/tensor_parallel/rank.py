"""One rank of a group: INDEX SIZE ADDRESS FOLDER. The first computes each case of cases.json alone, too, and writes
what it found with the others to found.json."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from attn_core import installed
from attn_core.splitting import Rank
from attn_engine import Request, build_engine
from attn_engine.host.ranks import Messages, join
from attn_engine.tensor_parallel import Follower, Leader
from attn_models.tensor_parallel import Collectives, split_model
from attn_schema import EngineConfig, SamplingParams

SIZES = {"vocab_size": 48, "max_seq_len": 96, "hidden_size": 32, "num_layers": 1, "num_heads": 4}
SHARED = [7, 3, 11, 2, 9, 9, 1, 30, 22, 5, 17, 8, 40, 13, 6, 28, 19]
"""Longer than a block, so that prompts that begin with it share one."""
PROMPTS = [[*SHARED, 4, 44], [*SHARED, 31], [5, 6], [*SHARED, 4, 44, 12]]
WAYS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11, "n": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    {"num_beams": 3, "temperature": 0.0},
]


def built(values):
    """A decoder whose logits are far apart, in float64."""
    torch.manual_seed(1)
    family = installed().models.get("decoder")
    model = family.build(family.configure({**SIZES, **values})).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.ndim > 1:
            parameter.data.mul_(4.0)
    return model


def tokens_of(engine, new_tokens):
    """All tokens by request and completion; requests join while others run, and one is cancelled."""
    found = {}
    for number, (prompt, way) in enumerate(zip(PROMPTS, WAYS, strict=True)):
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **way)
        engine.submit(Request(id=f"r{number}", token_ids=tuple(prompt), params=params, scope="all"))
        gather(engine.step(), found)
    engine.submit(Request(id="gone", token_ids=tuple(SHARED), params=SamplingParams(max_new_tokens=20), scope="all"))
    gather(engine.step(), found)
    engine.cancel("gone")
    while not engine.idle:
        gather(engine.step(), found)
    # Once more, when what the first has computed is remembered.
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id="again", token_ids=tuple(PROMPTS[0]), params=params, scope="all"))
    while not engine.idle:
        gather(engine.step(), found)
    del found["gone.0"]
    return found


def gather(outputs, found):
    for output in outputs:
        if output.error is not None and output.request_id != "gone":
            raise output.error
        tokens = found.setdefault(f"{output.request_id}.{output.delta.index}", [])
        tokens += [token.id for token in output.delta.tokens]


def bytes_held(model, family):
    """Bytes of a request of 32 tokens in a cache of this family."""
    return installed().caches.get(family).bytes(model.state_specs(), tokens=32, dtype="float64")


def lead(case, rank, messages):
    """What one process, and all ranks together, make of a case."""
    config = EngineConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, **case.get("engine", {})})
    draft = {"draft_model": built({})} if case.get("draft") else {}
    sizes = {"kv_cache_tokens": case.get("cache_tokens", 512)}
    alone = build_engine(built(case["model"]), None, config, **sizes, **draft)
    model = built(case["model"])
    whole = bytes_held(model, config.kv_cache)
    split_model(model, rank, Collectives.serving())
    lost = []
    leader = Leader(messages.send, lost.append)
    engine = build_engine(model, None, config, **sizes, **draft, ranks=leader)
    new_tokens = case.get("new_tokens", 5)
    found = {
        "alone": tokens_of(alone, new_tokens),
        "ranks": tokens_of(engine, new_tokens),
        "bytes": [whole, bytes_held(model, config.kv_cache)],
        "stats": {name: getattr(engine.stats(), name) for name in ("cached_tokens", "preemptions", "accepted_tokens")},
        "lost": [repr(error) for error in lost],
    }
    leader.stop()
    return found


def main(index, size, address, folder):
    torch.set_num_threads(1)
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=120))
    rank, cases, found = Rank(index, size), json.loads((folder / "cases.json").read_text()), {}
    join(store, rank, torch.device("cpu"))
    for name, case in cases.items():
        messages = Messages(store, f"{size} {name}")
        if index == 0:
            found[name] = lead(case, rank, messages)
            continue
        model = built(case["model"])
        split_model(model, rank, Collectives.serving())
        follower = Follower(model)
        while not follower.stopped:
            follower.follow(messages.receive())
    if index == 0:
        (folder / f"found{size}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
