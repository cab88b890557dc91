"""How does the time of one decoded token grow with the context, for each kind of state?

Random models of one shape with different attention mechanisms, run by the engine. The time should grow linearly for
full attention, and not at all for sliding windows, linear attention, Performer and an LSTM:

    python benchmarks/growth_cpu.py

The result, with slopes fitted by least squares, is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_measures import slope
from report import write_report

CONTEXTS = (512, 1024, 2048, 4096)
SHAPE = {"vocab_size": 256, "max_seq_len": 8192, "hidden_size": 256, "num_layers": 4, "num_heads": 4, "norm": "rms"}
SHAPE |= {"feed_forward": "swiglu"}
LSTM = {
    "vocab_size": 256,
    "max_seq_len": 8192,
    "max_encoder_len": 8,
    "hidden_size": 256,
    "embedding": 256,
    "num_layers": 4,
}
"""The encoder-decoder LSTM of Sutskever et al. 2014, here with a source of 8 tokens."""
MECHANISMS: dict[str, dict[str, Any]] = {
    "mha": {"positions": "rotary"},
    "sliding_window": {"positions": "rotary", "options": {"window": 256}},
    "linear": {"positions": "none"},
    "performer": {"positions": "none"},
}


def rounds(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import torch
    from attn_models.decoder.decoder import Decoder
    from attn_models.encoder_decoder.config import BottleneckConfig
    from attn_models.encoder_decoder.translation import Bottleneck
    from attn_models.quantization.quantize import quantize_model
    from attn_schema.decoder import DecoderConfig

    torch.set_num_threads(args.threads)
    for name, fields in MECHANISMS.items():
        for weights in (None, "float32"):
            torch.manual_seed(0)
            model = Decoder(DecoderConfig.from_plain(SHAPE | {"mechanism": name} | fields)).eval()
            if weights is not None:
                quantize_model(model, weights)
            loaded: Any = SimpleNamespace(model=model, tokenizer=None)
            yield {"mechanism": name, "weights": weights or "not packed"} | slope(loaded, "shared", CONTEXTS)
    torch.manual_seed(0)
    loaded = SimpleNamespace(model=Bottleneck(BottleneckConfig.from_plain(LSTM)).eval(), tokenizer=None)
    yield {"mechanism": "LSTM", "weights": "not packed"} | slope(loaded, "shared", CONTEXTS)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    facts = {"question": "milliseconds of processor for one decoded token by length of context", "shape": SHAPE}
    write_report("growth_cpu", facts, rounds(args), args.out)


if __name__ == "__main__":
    main()
