"""The configuration and the load statistics of an inference engine."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from msgspec import Meta

from attn_schema.device import DeviceConfig
from attn_schema.sampling import MAX_SPECULATIVE_TOKENS
from attn_schema.schema import MODEL, Schema

MAX_SPECULATIVE_TREE_WIDTH = 8
MAX_LORAS = 1024
MAX_RANKS = 64
MAX_SEQUENCES = 2**16
MAX_STEP_TOKENS = 2**24
MAX_QUEUED = 2**20
MAX_MEMORY_BYTES = 2**50
MAX_THREADS = 4096
DRAFT_MODEL_TOKENS = 4
"""The default of `num_speculative_tokens` with a draft model."""

KV_CACHE_BYTES = 512 * 2**20
"""The default memory for the KV cache on a CPU, in bytes."""
BATCH_SIZES = {"cpu": (64, 256), "cuda": (256, 2048)}
"""The default `max_num_seqs` and `max_num_batched_tokens` by device type; other types use those of "cpu"."""

Quantization = Literal["auto", "none", "float32", "bfloat16", "int8", "int4", "fp8"]
ModelImpl = Literal["auto", "native", "transformers"]


class EngineConfig(DeviceConfig, frozen=True, kw_only=True):
    """The configuration of the inference engine that runs a model."""

    kernel: Annotated[
        str, Meta(description="Attention kernel, by name; if it does not support the model, loading fails.")
    ] | None = None  # fmt: skip
    quantization: Annotated[
        Quantization,
        Meta(
            description="Storage of the weights of linear layers: auto (as in the file, prepacked where that is "
            "lossless), none (as dtype, not prepacked), or a type; fp8 requires a GPU, and quantizes the inputs as "
            "well if the GPU multiplies in FP8."
        ),
    ] = "auto"  # fmt: skip
    model_impl: Annotated[
        ModelImpl,
        Meta(
            description="Who builds the model: native (its layout here), transformers (with attn's attention and KV "
            "cache), or auto (transformers where there is no layout, or it refuses the config).",
        ),
    ] = "auto"  # fmt: skip
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1, le=MAX_RANKS,
            description="Number of processes, each with a device of its own, over which the heads and inner sizes of "
            "the model are split; these must be divisible by it.",
        ),
    ] = 1  # fmt: skip
    kv_cache: Annotated[
        str, Meta(description="KV cache, by name, such as shared or int8; see `attn list caches`.")
    ] = "attn-cache/shared"  # fmt: skip
    kv_cache_memory_bytes: Annotated[
        int,
        Meta(
            ge=1, le=MAX_MEMORY_BYTES,
            description="Memory for the KV cache of all requests, in bytes; if not given, 512 MiB on a CPU, and on a "
            "GPU the memory that remains within gpu_memory_utilization.",
        ),
    ] | None = None  # fmt: skip
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0, le=1,
            description="Fraction of a GPU's memory for weights, activations and KV cache together; also the fraction "
            "of a GPU that is reserved for the engine.",
        ),
    ] = 0.9  # fmt: skip
    max_num_seqs: Annotated[
        int,
        Meta(
            ge=1, le=MAX_SEQUENCES,
            description="Maximum number of sequences in a step; if not given, 64, or 256 on a CUDA device.",
        ),
    ] | None = None  # fmt: skip
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=1, le=MAX_STEP_TOKENS,
            description="Maximum number of tokens computed in a step, prefill and decode together; if not given, 256, "
            "or 2048 on a CUDA device.",
        ),
    ] | None = None  # fmt: skip
    max_queued_requests: Annotated[
        int,
        Meta(
            ge=1, le=MAX_QUEUED,
            description="Maximum number of requests that wait to be scheduled; further ones are rejected.",
            extra={"wire": False, "flag": False},
        ),
    ] = 1024  # fmt: skip
    kv_offload_bytes: Annotated[
        int,
        Meta(
            ge=0, le=MAX_MEMORY_BYTES,
            description="Memory for the KV cache of preempted requests, in bytes; with 0 it is recomputed.",
        ),
    ] = 0  # fmt: skip
    num_speculative_tokens: Annotated[
        int,
        Meta(
            ge=0, le=MAX_SPECULATIVE_TOKENS,
            description=f"Default draft tokens per step of a request; {DRAFT_MODEL_TOKENS} with a draft model, "
            "if not given. Without a draft model they come from the text itself (prompt lookup), and if not given, "
            "there are as many as pay on a CPU with prepacked weights, elsewhere 0.",
        ),
    ] | None = None  # fmt: skip
    draft_model: Annotated[
        str,
        Meta(
            description="Smaller model with the same tokenizer that proposes draft tokens, by name or folder.",
            extra={"metavar": "NAME|PATH", "names": MODEL},
        ),
    ] | None = None  # fmt: skip
    speculative_tree_width: Annotated[
        int,
        Meta(
            ge=1, le=MAX_SPECULATIVE_TREE_WIDTH,
            description="Candidates for each draft token; above 1 they form a tree that is verified in one step.",
        ),
    ] = 1  # fmt: skip
    max_loras: Annotated[
        int, Meta(ge=0, le=MAX_LORAS, description="Maximum number of LoRA adapters loaded on the model at a time.")
    ] = 8  # fmt: skip
    enforce_eager: Annotated[
        bool,
        Meta(
            description="Run all steps eagerly, without CUDA graphs.",
            extra={"wire": False, "flag": False},
        ),
    ] = False  # fmt: skip
    max_cudagraph_capture_size: Annotated[
        int,
        Meta(
            ge=0, le=MAX_STEP_TOKENS,
            description="Maximum number of tokens of a step with prompts that is captured as a CUDA graph; larger "
            "steps run eagerly, and with 0 all of them do. The graphs take the memory of one step of that size.",
            extra={"wire": False, "flag": False},
        ),
    ] = 2048  # fmt: skip
    async_scheduling: Annotated[
        bool,
        Meta(
            description="Launch a decode step before the tokens of the previous one are known, so that a GPU does not "
            "wait for the host; the generated tokens are the same. Steps with prompts, grammars, drafts or beams are "
            "not launched early.",
        ),
    ] = False  # fmt: skip
    batch_invariant: Annotated[
        bool,
        Meta(
            description="Compute every token by the same operations in the same order whatever is computed beside "
            "it, so that log probabilities are, bit for bit, those of any other batch, chunk or cached prefix, and of "
            "training with the same option; in float32 or 16 bits on a CPU. Models that cannot be computed so are "
            "refused.",
        ),
    ] = False  # fmt: skip
    num_threads: Annotated[
        int,
        Meta(
            ge=1, le=MAX_THREADS,
            description="Threads for tensor operations; all cores if not given.", extra={"wire": False},
        ),
    ] | None = None  # fmt: skip
    tenant_weights: Annotated[
        dict[str, Annotated[float, Meta(gt=0)]],
        Meta(
            description="Weights for fair queueing: a tenant of weight 2 gets twice the tokens of one of weight 1 "
            "while both have waiting requests. Tenants that are not named have weight 1.",
            extra={"wire": False, "flag": False},
        ),
    ] = {}  # noqa: RUF012 - msgspec copies it  # fmt: skip
    fingerprint: Annotated[
        str,
        Meta(
            description="Fingerprint of the model's files; an engine that finds other files is not started. A server "
            "sets it, so that engines that start later serve what was loaded.",
            extra={"wire": False, "flag": False},
        ),
    ] = ""  # fmt: skip

    def with_defaults(self, device_type: str) -> Self:
        """A copy in which unset `max_num_seqs` and `max_num_batched_tokens` have the defaults of this device type, such
        as "cuda".
        """
        sequences, tokens = BATCH_SIZES.get(device_type, BATCH_SIZES["cpu"])
        return self.replace(
            max_num_seqs=self.max_num_seqs or sequences, max_num_batched_tokens=self.max_num_batched_tokens or tokens
        )

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens`, with the defaults of a CPU if they are not set."""
        sequences, tokens = BATCH_SIZES["cpu"]
        return self.max_num_seqs or sequences, self.max_num_batched_tokens or tokens


class EngineStats(Schema, frozen=True, kw_only=True):
    """The load of an engine, or of all replicas of a model together. Counters count since the model was loaded."""

    running: Annotated[int, Meta(description="Requests in the current batch.")] = 0
    waiting: Annotated[int, Meta(description="Requests that wait to be scheduled.")] = 0
    kv_tokens_used: Annotated[int, Meta(description="Tokens in the KV cache, of all requests.")] = 0
    kv_tokens_total: Annotated[int, Meta(description="Tokens the KV cache can hold.")] = 0
    preemptions: Annotated[int, Meta(description="Preemptions (counter).")] = 0
    cached_tokens: Annotated[int, Meta(description="Prompt tokens found in the prefix cache (counter).")] = 0
    generated_tokens: Annotated[int, Meta(description="Generated tokens (counter).")] = 0
    draft_tokens: Annotated[int, Meta(description="Draft tokens of speculative decoding (counter).")] = 0
    accepted_tokens: Annotated[int, Meta(description="Draft tokens that were accepted (counter).")] = 0
    computed_tokens: Annotated[int, Meta(description="Tokens computed, recomputed ones included (counter).")] = 0
    reloaded_tokens: Annotated[
        int, Meta(description="Tokens of preempted requests whose KV cache was reloaded, not recomputed (counter).")
    ] = 0  # fmt: skip
    imported_tokens: Annotated[
        int, Meta(description="Tokens of prompts whose state a prefill replica computed (counter).")
    ] = 0  # fmt: skip
    offloaded_bytes: Annotated[
        int, Meta(description="State of preempted and imported requests held outside of the KV cache, in bytes.")
    ] = 0  # fmt: skip
    resident_memory_bytes: Annotated[
        int, Meta(description="Resident memory of the engine's process, in bytes; the process may be that of the "
        "server.")
    ] = 0  # fmt: skip
    cpu_seconds: Annotated[
        float, Meta(description="Processor time that the engine's process has used, in seconds (counter).")
    ] = 0.0
    replicas: Annotated[
        tuple[ReplicaStats, ...], Meta(description="The statistics of each replica; empty for a model with one engine.")
    ] = ()


class ReplicaStats(Schema, frozen=True, kw_only=True):
    """The load of one replica."""

    name: Annotated[str, Meta(description="Its name, which is never reused for another replica.")]
    stats: Annotated[EngineStats, Meta(description="Load of its engine.")]
