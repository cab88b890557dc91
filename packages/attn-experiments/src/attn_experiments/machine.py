"""Time, memory traffic and energy of attention on a known GPU, calculated from its data sheet; nothing is measured.

A kernel takes at least the time of its matrix products at the peak rate, and of its memory traffic at the peak
bandwidth; the longer of the two is the bound (the roofline model, Williams et al. 2009). Energy is the power limit
times that time: an upper bound for that time, and the usual estimate (Patterson et al. 2021, arXiv 2104.10350, who use
the mean power).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from attn_core.errors import InvalidValue, UnknownName
from attn_schema.output import Json, print_json, print_table

from attn_experiments.report import Result, Settings, judged

TEN = {"k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18, "Z": 21}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's data sheet: dense 16-bit FLOP/s, bytes of memory, bytes/s, multiprocessors, SRAM bytes of each, watts."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    processors: int
    sram: int
    watts: float

    @property
    def ridge(self) -> float:
        """The arithmetic intensity, in FLOPs per byte, above which a kernel is compute-bound."""
        return self.flops / self.bandwidth

    @property
    def all_sram(self) -> int:
        """The SRAM of all multiprocessors, in bytes."""
        return self.processors * self.sram


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA A100 Tensor Core GPU, data sheet (2022) and architecture whitepaper (192 KB of L1 and shared memory).
        Gpu(
            name="a100-40gb", flops=312e12, memory=40e9, bandwidth=1.555e12, processors=108, sram=192 * 1024, watts=400
        ),
        Gpu(
            name="a100-80gb", flops=312e12, memory=80e9, bandwidth=2.039e12, processors=108, sram=192 * 1024, watts=400
        ),
        # NVIDIA H100 SXM and H200, data sheets (2023); 256 KB of L1 and shared memory.
        Gpu(name="h100", flops=989e12, memory=80e9, bandwidth=3.35e12, processors=132, sram=256 * 1024, watts=700),
        Gpu(name="h200", flops=989e12, memory=141e9, bandwidth=4.8e12, processors=132, sram=256 * 1024, watts=700),
    )
}


def gpu(name: str) -> Gpu:
    """The GPU of this name; raises `UnknownName` if it is not in `GPUS`."""
    if name not in GPUS:
        raise UnknownName.of("GPU", name, GPUS)
    return GPUS[name]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A forward pass of attention: `batch` sequences of `tokens`, `heads` heads of `size` elements of `bytes_each`."""

    batch: int = 1
    tokens: int
    heads: int
    size: int
    bytes_each: int = 2

    def __post_init__(self) -> None:
        for field in ("batch", "tokens", "heads", "size", "bytes_each"):
            if getattr(self, field) < 1:
                raise InvalidValue.of(field, getattr(self, field), "a whole number from 1")

    @property
    def rows(self) -> int:
        """The number of queries, over all sequences and heads."""
        return self.batch * self.heads * self.tokens

    @property
    def flops(self) -> int:
        """4 n² d for each head: two matrix products, with two operations per multiply-add; without the softmax."""
        return 4 * self.rows * self.tokens * self.size

    @property
    def standard_bytes(self) -> int:
        """Bytes moved by algorithm 0: queries, keys, values and outputs once; scores and weights written and read."""
        return self.bytes_each * (4 * self.rows * self.size + 4 * self.rows * self.tokens)

    def flash_bytes(self, fast: int) -> int:
        """Bytes moved by algorithm 1 with `fast` bytes of SRAM; its running sums and maxima are float32."""
        columns = max(1, fast // self.bytes_each // (4 * self.size))
        passes = math.ceil(self.tokens / columns)
        rows = 2 * self.rows * self.size + passes * 3 * self.rows * self.size
        return self.bytes_each * rows + passes * 4 * self.rows * 4


@dataclass(frozen=True)
class Bound:
    """The minimum time for matrix products and for memory traffic, and the energy at the power limit for the longer."""

    flops: float
    bytes: float
    gpu: Gpu

    @property
    def compute(self) -> float:
        """Seconds for the matrix products at the peak rate."""
        return self.flops / self.gpu.flops

    @property
    def traffic(self) -> float:
        """Seconds for the memory traffic at the peak bandwidth."""
        return self.bytes / self.gpu.bandwidth

    @property
    def seconds(self) -> float:
        """The longer of both times, in seconds."""
        return max(self.compute, self.traffic)

    @property
    def joules(self) -> float:
        """The energy at the power limit, in joules."""
        return self.seconds * self.gpu.watts


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """A step in which each of `batch` sequences of `tokens` cached tokens gets one more, of one layer or, with
    `parameters`, of a whole model of `layers` layers.

    `heads` query heads of `size` elements read `kv_heads` heads of keys and values, of `bytes_each` as the parameters.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    size: int
    layers: int = 1
    parameters: float = 0.0
    bytes_each: int = 2

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InvalidValue.of("--num-kv-heads", self.kv_heads, f"a divisor of the {self.heads} heads")
        if self.parameters < 0:
            raise InvalidValue.of("--parameters", self.parameters, "a number from 0")

    @property
    def cache_bytes(self) -> int:
        """The bytes of all cached keys and values, which are read once."""
        return 2 * self.layers * self.batch * self.tokens * self.kv_heads * self.size * self.bytes_each

    def bounds(self, on: Gpu) -> dict[str, Bound]:
        """The bounds of reading the cache, and of the products with the parameters, which all sequences share."""
        flops = 4 * self.layers * self.batch * self.heads * self.tokens * self.size
        found = {"decode step: cache": Bound(flops, self.cache_bytes, on)}
        if self.parameters:
            weights = Bound(2 * self.parameters * self.batch, self.parameters * self.bytes_each, on)
            found["decode step: parameters"] = weights
        return found


def bounds(call: Call, on: Gpu) -> dict[str, Bound]:
    """The bound of each algorithm; tiles are sized for one multiprocessor's SRAM, as each works independently."""
    return {
        "algorithm 0: matrices": Bound(call.flops, call.standard_bytes, on),
        "algorithm 1: tiles": Bound(call.flops, call.flash_bytes(on.sram), on),
        "every number once": Bound(call.flops, call.bytes_each * 4 * call.rows * call.size, on),
    }


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training run: 6 FLOPs per parameter and token (Kaplan et al. 2020), on `gpus` GPUs at a share of their peak."""

    parameters: float
    tokens: float
    gpus: int
    on: Gpu
    utilisation: float = 0.4

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1:
            raise InvalidValue.of("utilisation", self.utilisation, "a share above 0, at most 1")
        if self.parameters <= 0 or self.tokens <= 0 or self.gpus < 1:
            raise InvalidValue.of("training", (self.parameters, self.tokens, self.gpus), "numbers above 0")

    @property
    def gpu_hours(self) -> float:
        """The total number of GPU hours."""
        return 6 * self.parameters * self.tokens / (self.utilisation * self.on.flops) / 3600

    @property
    def days(self) -> float:
        """The training time in days, with all GPUs."""
        return self.gpu_hours / self.gpus / 24

    def kilowatt_hours(self, overhead: float = 1.1) -> float:
        """The energy in kWh: at the power limit, times the data centre's overhead (PUE)."""
        return self.gpu_hours * self.on.watts / 1000 * overhead

    def carbon(self, grams: float, overhead: float = 1.1) -> float:
        """The emissions in kg of CO2, of a grid with so many grams for each kWh."""
        if grams < 0:
            raise InvalidValue.of("--grams", grams, "a number from 0")
        return self.kilowatt_hours(overhead) * grams / 1000


def roofline_command(  # noqa: PLR0913 -- options, given by name
    *,
    name: Annotated[str, typer.Argument(help="a100-40gb, a100-80gb, h100 or h200.")] = "a100-40gb",
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 8,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 1024,
    num_heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 12,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 64,
    decode: Annotated[
        bool, typer.Option("--decode", help="One step that adds a token to each sequence, not a forward pass.")
    ] = False,
    num_kv_heads: Annotated[
        int | None, typer.Option("--num-kv-heads", min=1, help="With --decode: key/value heads, by default all.")
    ] = None,
    num_layers: Annotated[int, typer.Option("--num-layers", min=1, help="With --decode: number of layers.")] = 1,
    parameters: Annotated[float, typer.Option(help="With --decode: parameters that the step reads, too.")] = 0.0,
    json: Json = False,
) -> None:
    """Calculate bounds for the time and energy of attention on a GPU from its data sheet; nothing is measured.

    Examples: `attn roofline a100-40gb --seq 4096`, `attn roofline h100 --decode --num-heads 64 --num-kv-heads 8`
    """
    on = gpu(name)
    if decode:
        sizes = {"batch": batch, "tokens": seq, "heads": num_heads, "kv_heads": num_kv_heads or num_heads}
        found = DecodeStep(**sizes, size=head_dim, layers=num_layers, parameters=parameters).bounds(on)
    elif num_kv_heads is not None or num_layers > 1 or parameters:
        raise InvalidValue.of("options", "--num-kv-heads, --num-layers or --parameters", "--decode with them")
    else:
        found = bounds(Call(batch=batch, tokens=seq, heads=num_heads, size=head_dim), on)
    if json:
        print_json({"gpu": on.name, "ridge": on.ridge, "attention": [_plain(*pair) for pair in found.items()]})
        return
    rates = f"{prefixed(on.flops)}FLOP/s in 16 bits, {prefixed(on.bandwidth)}B/s"
    sram = f"{on.processors} x {on.sram // 1024} KiB of SRAM"
    typer.echo(
        f"{on.name}: {rates}, {sram}, {on.watts:g} W; products bound a kernel from {on.ridge:.0f} FLOPs a byte.\n"
    )
    print_table([bound_row(kind, bound) for kind, bound in found.items()], "nothing to price")


def energy_command(
    *,
    name: Annotated[str, typer.Argument(help="a100-40gb, a100-80gb, h100 or h200.")] = "a100-40gb",
    parameters: Annotated[float, typer.Option(help="Active parameters of the model.")] = 124e6,
    train_tokens: Annotated[float, typer.Option(help="Number of training tokens.")] = 9e9,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 8,
    utilisation: Annotated[float, typer.Option(help="Fraction of the peak rate that training reaches.")] = 0.4,
    grams: Annotated[float, typer.Option(help="Grams of CO2 for each kWh of the grid; about 400 worldwide.")] = 400,
    json: Json = False,
) -> None:
    """Calculate the GPU hours, the energy and the emissions of training a model; nothing is measured.

    Example: `attn energy a100-40gb --parameters 1.5e9 --train-tokens 30e9 --utilisation 0.5`
    """
    trained = Training(parameters=parameters, tokens=train_tokens, gpus=gpus, on=gpu(name), utilisation=utilisation)
    if json:
        hours = {"gpu_hours": trained.gpu_hours, "days": trained.days, "kilowatt_hours": trained.kilowatt_hours()}
        hours["co2_kilograms"] = trained.carbon(grams)
        print_json({"gpu": name, "gpus": gpus, **hours})
    else:
        print_table([training_facts(trained) | {"CO2": f"{trained.carbon(grams):.0f} kg"}], "nothing to train")


def _plain(kind: str, bound: Bound) -> dict[str, Any]:
    """The bound of one algorithm as values for JSON: counts, seconds and joules."""
    seconds = {"products_seconds": bound.compute, "traffic_seconds": bound.traffic}
    return {"forward": kind, "flops": bound.flops, "bytes": bound.bytes, **seconds, "joules": bound.joules}


def bound_row(kind: str, bound: Bound) -> dict[str, Any]:
    """The table row of one algorithm."""
    return {
        "computed": kind,
        "FLOPs": prefixed(bound.flops),
        "bytes": prefixed(bound.bytes),
        "FLOPs a byte": f"{bound.flops / bound.bytes:.0f}",
        "products": f"{1e6 * bound.compute:.1f} µs",
        "traffic": f"{1e6 * bound.traffic:.1f} µs",
        "bound by": "products" if bound.compute >= bound.traffic else "traffic",
        "energy": f"{1e3 * bound.joules:.2f} mJ",
    }


def training_facts(trained: Training) -> dict[str, Any]:
    """The table row of a training run: FLOPs, GPU hours, days and energy."""
    return {
        "training FLOPs": prefixed(6 * trained.parameters * trained.tokens),
        "GPU hours": f"{trained.gpu_hours:.1f}",
        f"days on {trained.gpus}": f"{trained.days:.2f}",
        "energy": f"{trained.kilowatt_hours():.0f} kWh",
    }


def prefixed(number: float) -> str:
    """A number with an SI prefix, such as 312 T."""
    for letter, power in reversed(TEN.items()):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {letter}"
    return f"{number:.3g} "


def shares(settings: Settings) -> Result:
    """CL-61: the parts of the forward pass of Llama 3 70B over 8 sequences of tokens, by length, in FLOPs."""
    width, inner, layers, words, kv_width = 8192, 28_672, 80, 128_256, 1024
    rows, pairs, attention = [], {}, {}
    for tokens in (1000, 8000, 128_000):
        parts = {
            "projections of attention": layers * 2 * width * (2 * width + 2 * kv_width),
            "pairs of attention": layers * 4 * tokens * width,
            "feed-forward": layers * 2 * 3 * width * inner,
            "unembedding": 2 * width * words,
        }
        total = sum(parts.values())
        pairs[tokens] = parts["pairs of attention"] / total
        attention[tokens] = pairs[tokens] + parts["projections of attention"] / total
        told = {name: f"{100 * part / total:.1f} %" for name, part in parts.items()}
        rows.append({"tokens": str(tokens), "FLOPs": prefixed(8 * tokens * total)} | told)
        settings.say(str(rows[-1]))
    verdict, because = judged(
        all_of={
            f"at 1,000 tokens attention is more than half ({100 * attention[1000]:.0f} %)": attention[1000] > 0.5,
            f"its pairs are more than half at 1,000 tokens ({100 * pairs[1000]:.1f} %)": pairs[1000] > 0.5,
            f"its pairs are more than half at 128,000 tokens ({100 * pairs[128_000]:.0f} %)": pairs[128_000] > 0.5,
        }
    )
    return Result(rows=rows, verdict=verdict, because=because)
