"""The estimated cost of a training job, computed before it starts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from attn_schema.schema import Schema


class JobEstimate(Schema, frozen=True, kw_only=True):
    """The FLOPs, memory, disk space and time that a training job would need; memory sizes are one worker's peak."""

    device: Annotated[str, Meta(description="Device of each worker.")] = ""
    workers: Annotated[int, Meta(description="Workers that share each batch.")] = 0
    steps: Annotated[int, Meta(description="Optimizer steps.")] = 0
    sequences_per_step: Annotated[int, Meta(description="Sequences, pairs or images in a step, over all workers.")] = 0
    tokens_per_step: Annotated[float, Meta(description="Mean number of target tokens in a step, over all workers.")] = (
        0.0
    )
    parameters: Annotated[int, Meta(description="Parameters of the model.")] = 0
    trained_parameters: Annotated[int, Meta(description="Parameters that are trained.")] = 0
    flops: Annotated[
        float,
        Meta(description="FLOPs of the matrix products of all steps, forward and backward, as torch counts them."),
    ] = 0.0
    allowed_flops: Annotated[
        float,
        Meta(
            description="FLOPs that count only the query-key pairs that masks allow, as --budget does; only for "
            "decoders without experts, else 0."
        ),
    ] = 0.0  # fmt: skip
    weight_bytes: Annotated[int, Meta(description="Parameters and buffers.")] = 0
    gradient_bytes: Annotated[int, Meta(description="Gradients.")] = 0
    optimizer_bytes: Annotated[int, Meta(description="State of the optimizer, and averages of weights.")] = 0
    activation_bytes: Annotated[int, Meta(description="Everything else at the peak: activations and products.")] = 0
    process_bytes: Annotated[int, Meta(description="A worker's process with its libraries and data, on the host.")] = 0
    memory_bytes: Annotated[
        int, Meta(description="Memory of the device at the peak; on a CPU with that of the process.")
    ] = 0
    checkpoint_bytes: Annotated[int, Meta(description="One checkpoint.")] = 0
    checkpoints: Annotated[int, Meta(description="Checkpoints that are written.")] = 0
    disk_bytes: Annotated[
        int, Meta(description="Disk space for checkpoints that are kept, one that is being written, and the model.")
    ] = 0
    seconds_per_step: Annotated[float, Meta(description="Measured time of a step.")] = 0.0
    seconds: Annotated[
        float, Meta(description="Time of all steps, without starting, validation and writing checkpoints.")
    ] = 0.0
    timed: Annotated[str, Meta(description="How times and memory were determined.")] = ""
