"""Small real language models, one for each kind of state, and a byte tokenizer. In float64, so that batches of other
sizes cannot tip a greedy choice."""

from __future__ import annotations

import torch
from attn_core import Field, Paged, RaggedBatch, Slot, Source
from attn_core.batch import StaticRows
from torch import Tensor, nn

VOCABULARY, WIDTH, CONTEXT = 64, 16, 96


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = (query @ key.T / WIDTH**0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ value


class Softmax(nn.Module):
    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.window = window

    def specs(self):
        return {"kv": Paged({"key": Field((WIDTH,)), "value": Field((WIDTH,))}, window=self.window)}

    def step(self, x: Tensor, batch: RaggedBatch, state) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        state["kv"].append({"key": key, "value": value})
        rows = state["kv"].rows(range(batch.requests))
        out = []
        for span in batch.spans():
            r = span.request
            at = batch.positions[span.start : span.stop, None]
            allowed = rows.positions[r] <= at
            if self.window is not None:
                allowed = allowed & (rows.positions[r] > at - self.window)
            if rows.key_padding_mask is not None:
                allowed = allowed & rows.key_padding_mask[r]
            out.append(attend(query[span.start : span.stop], rows.fields["key"][r], rows.fields["value"][r], allowed))
        return torch.cat(out)


class InPlace(Softmax):
    """Softmax whose recorded steps read blocks where they lie, always as many: a kernel of a GPU in a few lines."""

    def step(self, x, batch, state):
        rows = getattr(state["kv"], "in_place", lambda: None)()
        if not isinstance(rows, StaticRows):
            return super().step(x, batch, state)
        query, key, value = self.project(x).chunk(3, -1)
        state["kv"].append({"key": key, "value": value})
        size, tables = rows.block_size, rows.kv_indices.long()
        # Of each token, whose it is; padding is of the last, which has no table.
        owners = torch.searchsorted(rows.query_starts, torch.arange(len(query)), right=True) - 1
        tables = tables[owners.clamp(max=len(tables) - 1)]
        last = torch.where(rows.contexts[owners] < 0, -1, batch.positions)
        places = (tables[..., None] * size + torch.arange(size)).flatten(1)
        behind = last[:, None] - torch.arange(places.shape[1])
        allowed = behind >= 0
        if self.window is not None:
            allowed = allowed & (behind < self.window)
        keys, values = (rows.fields[name][places] for name in ("key", "value"))
        # Padding attends to something, as no numbers are what a softmax over nothing gives.
        allowed = allowed | (last < 0)[:, None]
        return torch.cat([attend(query[r, None], keys[r], values[r], allowed[r]) for r in range(len(query))])


class Linear(nn.Module):
    """Linear attention (Katharopoulos et al. 2020): sums of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def specs(self):
        return {"sums": Slot({"s": Field((WIDTH, WIDTH)), "z": Field((WIDTH,))})}

    def step(self, x: Tensor, batch: RaggedBatch, state) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        query, key = nn.functional.elu(query) + 1, nn.functional.elu(key) + 1
        sums = {name: rows.clone() for name, rows in state["sums"].read().items()}
        out = []
        for span in batch.spans():
            for t in range(span.start, span.stop):
                sums["s"][span.request] += key[t, :, None] * value[t]
                sums["z"][span.request] += key[t]
                out.append(query[t] @ sums["s"][span.request] / (query[t] @ sums["z"][span.request]))
        state["sums"].write(sums)
        return torch.stack(out)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Linear(WIDTH, 2 * WIDTH)

    def specs(self):
        return {"source": Source({"key": Field((WIDTH,)), "value": Field((WIDTH,))})}

    def encode(self, memory: Tensor):
        key, value = self.memory(memory).chunk(2, -1)
        return {"source": {"key": key, "value": value}}

    def step(self, x: Tensor, batch: RaggedBatch, state) -> Tensor:
        rows = state["source"].rows(range(batch.requests))
        query = self.query(x)
        keep = (
            torch.ones_like(rows.positions, dtype=torch.bool)
            if rows.key_padding_mask is None
            else rows.key_padding_mask
        )
        return torch.cat(
            [
                attend(
                    query[s.start : s.stop],
                    rows.fields["key"][s.request],
                    rows.fields["value"][s.request],
                    keep[s.request],
                )
                for s in batch.spans()
            ]
        )


class Replay(nn.Module):
    """Knows only whole sequences: its inputs are remembered and it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def specs(self):
        return {"inputs": Paged({"x": Field((WIDTH,))})}

    def step(self, x: Tensor, batch: RaggedBatch, state) -> Tensor:
        state["inputs"].append({"x": x})
        out = []
        for span in batch.spans():
            whole = state["inputs"].rows([span.request]).fields["x"][0]
            full = self.mix(whole).tanh().cummax(0).values + whole.cumsum(0).tanh()
            out.append(full[len(whole) - (span.stop - span.start) :])
        return torch.cat(out)


class SmallModel(nn.Module):
    vocab_size = VOCABULARY
    max_seq_len = CONTEXT
    max_encoder_len = 12

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def state_specs(self):
        return {f"layer{i}": layer.specs() for i, layer in enumerate(self.layers)}

    def step(self, tokens: Tensor, batch: RaggedBatch, state) -> Tensor:
        x = self.embed(tokens) + self.place(batch.positions)
        for i, layer in enumerate(self.layers):
            x = x + layer.step(nn.functional.layer_norm(x, (WIDTH,)), batch, state[f"layer{i}"])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return 4 * self.head(nn.functional.layer_norm(hidden, (WIDTH,)))

    def encode(self, source: Tensor):
        memory = self.embed(source).tanh()
        return {f"layer{i}": layer.encode(memory) for i, layer in enumerate(self.layers) if isinstance(layer, Cross)}


KINDS = {
    "paged": lambda: (Softmax(), Softmax()),
    "window": lambda: (Softmax(window=7), Softmax()),
    "slot": lambda: (Linear(), Linear()),
    "source": lambda: (Softmax(), Cross()),
    "replay": lambda: (Replay(),),
    "hybrid": lambda: (Linear(), Softmax(window=5), Replay(), Cross()),
}


def small_model(kind: str) -> SmallModel:
    torch.manual_seed(7)
    return SmallModel(*KINDS[kind]()).double().eval()


class Bytes:
    """Token i is the byte i of `alphabet`, or of UTF-8 where none is given; the last token ends."""

    def __init__(self, alphabet: bytes = bytes(range(256))) -> None:
        self._alphabet = alphabet

    @property
    def vocab_size(self) -> int:
        return len(self._alphabet)

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset({len(self._alphabet) - 1})

    @property
    def special_ids(self) -> frozenset[int]:
        return self.end_ids

    def token(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")

    def token_bytes(self, token_id: int) -> bytes:
        return self._alphabet[token_id : token_id + 1]

    joins_tokens = True

    def encode(self, text: str) -> list[int]:
        return [self._alphabet.index(byte) for byte in text.encode()]

    def encode_within(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids, *, skip_special: bool = True) -> str:
        return bytes(self._alphabet[i] for i in ids).decode(errors="replace")


JSON = Bytes(b'{}[]":,. -+0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP_')
LETTERS = Bytes(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .")
