"""The training speed of `attn train` for GPT-2 small on the GPU, in bfloat16, compared with the model in plain torch.

Batches of 16 sequences of 1024 tokens, float32 weights under autocast, fused AdamW. MFU counts 6 N + 12 L H T FLOPs per
token (Chowdhery et al. 2022, arXiv 2204.02311, appendix B) relative to the GPU's 989 TFLOP/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import bare
import torch
from torch import Tensor, nn
from torch.nn import functional

bare.make_known()

from attn_models.decoder.decoder import Decoder  # noqa: E402
from attn_schema.decoder import DecoderConfig  # noqa: E402 -- whose mechanisms have just been made known
from attn_schema.training import EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig  # noqa: E402
from attn_train.records import NullReporter  # noqa: E402
from attn_train.tasks.language_modeling import TextDataset  # noqa: E402
from attn_train.trainer import Trainer  # noqa: E402

PEAK = 989e12
"""The dense bfloat16 FLOP/s of an H100 or H200, from NVIDIA's datasheet."""
UPDATES, WARMING = 12, 4


class Sizes(NamedTuple):
    """The sizes of the model and of an update."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    vocab_size: int = 50304
    tokens: int = 1024
    batch: int = 16


TINY = Sizes(hidden_size=32, num_layers=2, num_heads=2, vocab_size=128, tokens=32, batch=2)
WAYS: dict[str, dict[str, Any]] = {
    "attn": {},
    "attn, our kernels": {"kernel": "triton_attend"},
    "attn, compiled blocks": {"torch_compile": True},
    "attn, activation checkpointing": {"gradient_checkpointing": True},
}


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """One row for each way of training, attn's and plain torch's."""
    sizes = TINY if small else Sizes()
    updates: dict[str, Callable[[], tuple[Callable[[], Tensor], nn.Module]]] = {
        "plain torch": lambda: plain_update(sizes, device, compiled=False),
        **{
            name: lambda options=options: our_update(sizes, device, **options)  # type: ignore[misc]
            for name, options in WAYS.items()
            if not (small and options)
        },
    }
    updates["plain torch, compiled whole"] = lambda: plain_update(sizes, device, compiled=not small)
    compiled = None
    for name, made in reversed(updates.items()):  # what others are compared with is the last
        try:
            update, model = made()
            row = measured(update, model, sizes, device)
        except Exception as error:  # noqa: BLE001 -- whatever it is, other rows are measured
            row = {"refused": f"{type(error).__name__}: {error}"[:500]}
        update = model = None  # type: ignore[assignment]
        if device == "cuda":
            torch.cuda.empty_cache()
        compiled = compiled or row.get("tokens_per_second")
        beside = row["tokens_per_second"] / compiled if compiled and "refused" not in row else None
        yield {"case": "GPT-2 small, an update of attn train", "way": name, "beside_compiled": beside, **row}


def measured(update: Callable[[], Tensor], model: nn.Module, sizes: Sizes, device: str) -> dict[str, Any]:
    """The time of an update after compilation, and the figures derived from it."""
    first = float(update())
    for _ in range(WARMING if device == "cuda" else 0):
        update()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    count, began = (UPDATES if device == "cuda" else 1), time.perf_counter()
    for _ in range(count):
        update()
    host = (time.perf_counter() - began) / count
    if device == "cuda":
        torch.cuda.synchronize()
    took = (time.perf_counter() - began) / count
    weights = sum(weight.numel() for weight in model.parameters()) - sizes.tokens * sizes.hidden_size
    flops = 6 * weights + 12 * sizes.num_layers * sizes.hidden_size * sizes.tokens
    speed = sizes.batch * sizes.tokens / took
    peak = {"peak_bytes": torch.cuda.max_memory_allocated()} if device == "cuda" else {}
    return {
        "ms": 1e3 * took,
        "host_ms": 1e3 * host,
        "tokens_per_second": speed,
        "mfu": speed * flops / PEAK,
        "first_loss": first,
        **peak,
    }


def our_update(
    sizes: Sizes, device: str, kernel: str | None = None, **options: bool
) -> tuple[Callable[[], Tensor], nn.Module]:
    """An update with the trainer of `attn train`, and its model."""
    torch.manual_seed(0)
    same = {name: getattr(sizes, name) for name in ("hidden_size", "num_layers", "num_heads")}
    config = DecoderConfig(
        **same,
        vocab_size=sizes.vocab_size,
        max_seq_len=sizes.tokens,
        feed_forward="gelu_tanh",
        bias=True,
        mechanism="attn-variants/mha",
    )
    model = Decoder(config).to(device).train()
    for block in model.blocks:
        block.attention.use_kernel(kernel)
    ids = torch.randint(0, sizes.vocab_size, (1 << 20,), dtype=torch.int32)
    texts = TextDataset(training=ids, validation=ids[:0], tokenizer=Vocabulary(sizes.vocab_size))
    training = TrainingConfig(
        model=ModelConfig(**same, max_seq_len=sizes.tokens, mechanism="mha"),
        precision="bfloat16",
        optimizer=OptimizerConfig(steps=1000, batch_size=sizes.batch, warmup_steps=10),
        evaluation=EvaluationConfig(logging_steps=1000, eval_steps=1000),
        **options,
    )
    trainer = Trainer(model, texts, training)
    return (lambda: trainer._update(1e-4, NullReporter())[0]), model  # noqa: SLF001 -- one update, without what surrounds it


class Vocabulary(NamedTuple):
    """The attributes of a tokenizer that the task reads."""

    vocab_size: int


def plain_update(sizes: Sizes, device: str, *, compiled: bool) -> tuple[Callable[[], Tensor], nn.Module]:
    """An update in plain torch, and its model: torch's attention, all logits at once, fused AdamW."""
    torch.manual_seed(0)
    model = PlainModel(sizes).to(device)
    run = torch.compile(model) if compiled else model
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, sizes.vocab_size, (sizes.batch, sizes.tokens + 1), device=device)

    def update() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: Tensor = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        return loss.detach()

    return update, model


class PlainModel(nn.Module):
    """GPT-2 as typically written in plain torch."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.hidden_size
        self.heads = sizes.num_heads
        self.words, self.places = nn.Embedding(sizes.vocab_size, width), nn.Embedding(sizes.tokens, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "inputs": nn.Linear(width, 3 * width),
                    "output": nn.Linear(width, width),
                    "between": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(sizes.num_layers)
        )
        self.after = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of predicting targets [batch, token]."""
        rows = self.words(tokens) + self.places.weight
        for block in self.blocks:
            found = block["inputs"](block["before"](rows)).unflatten(-1, (3, self.heads, -1))
            query, key, value = found.permute(2, 0, 3, 1, 4).unbind(0)
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            rows = rows + block["output"](attended.transpose(1, 2).flatten(2))
            rows = rows + block["down"](functional.gelu(block["up"](block["between"](rows)), approximate="tanh"))
        logits = functional.linear(self.after(rows), self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
