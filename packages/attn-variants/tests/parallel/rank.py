"""One process of a group: attends to its part of a sequence and writes what it finds. Run by test_group.py.

    python rank.py RANK RANKS FOLDER WAYS

`WAYS` is `ours`, or `peer` for the ring of ring-attention-pytorch. `FOLDER/given.npz` holds the whole sequences and the
gradient of the output; `FOLDER/RANK.npz` is written.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads
from attn_variants.context_parallel import Contiguous, Striped, ring_attend_distributed, ulysses_attend_distributed


def ours(spec, ranks, group):
    return {
        "contiguous": (Contiguous(ranks), lambda own: ring_attend_distributed(spec, own, Contiguous(ranks), group)),
        "striped": (Striped(ranks), lambda own: ring_attend_distributed(spec, own, Striped(ranks), group)),
        "ulysses": (Contiguous(ranks), lambda own: ulysses_attend_distributed(spec, own, group)),
    }


def peer(spec, ranks, group):
    from ring_attention_pytorch import ring_flash_attn

    def attend(own):
        rows = (part.float() for part in (own.query, own.key, own.value))
        return ring_flash_attn(*rows, causal=True, bucket_size=3, ring_reduce_col=True).double()

    return {"peer": (Contiguous(ranks), attend)}


def main():
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    given = {name: torch.from_numpy(rows) for name, rows in np.load(folder / "given.npz").items()}
    heads = Heads(query=given["query"].shape[2], key_value=given["key"].shape[2], key_size=4, value_size=4)
    spec, tokens = AttentionSpec(heads=heads, mask=Causal()), given["query"].shape[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    found, ways = {}, {"ours": ours, "peer": peer}[sys.argv[4]](spec, ranks, dist.group.WORLD)
    for way, (sharding, attend) in ways.items():
        places = sharding.positions(rank, tokens)
        rows = [given[name][:, places].requires_grad_() for name in ("query", "key", "value")]
        out = attend(AttentionInputs(query=rows[0], key=rows[1], value=rows[2]))
        gradients = torch.autograd.grad(out, rows, given["upstream"][:, places])
        named = zip(("out", "query", "key", "value"), (out.detach(), *gradients), strict=True)
        found |= {f"{way}.{name}": rows.numpy() for name, rows in named}
    np.savez(folder / f"{rank}.npz", **found)
    dist.barrier()
    # Threads of gloo and of torch that are still alive when Python ends can end the process with an error.
    os._exit(0)


if __name__ == "__main__":
    main()
