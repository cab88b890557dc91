"""Estimates the FLOPs, memory, disk space and time of a job, from mechanism costs and a few steps on this machine.

As a program it reads a request as JSON from standard input and writes the estimate as JSON to standard output. It runs
in a process of its own, so that all its memory is freed when it ends.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from attn_core.errors import DeadlineExceeded, Incompatible, InternalError, starting
from attn_models.device import resolve_device
from attn_schema.estimate import JobEstimate
from attn_schema.training import JobError, TrainingConfig
from torch import nn

from attn_train.base_model import load_base, shapes_of_base
from attn_train.data.load import load_dataset
from attn_train.eight_bit import state_bytes
from attn_train.layout import MeshLayout
from attn_train.model import CHECKPOINT_BYTES, TRAINING_BYTES, configured, shapes_only
from attn_train.precision import blocks_of
from attn_train.pricing import SAMPLED_BATCHES, step_price
from attn_train.process_tuning import keep_freed_memory, spin_briefly
from attn_train.step_probe import StepProbe, trained_bytes, weight_bytes
from attn_train.tasks.base import Dataset, batch_weight
from attn_train.tasks.distillation import distilled
from attn_train.tasks.on_policy import OnPolicyTask
from attn_train.worker import as_attn_error, build_model

LONGEST_ESTIMATE = 600.0
"""Maximum seconds of an estimate, as others wait for it."""
LONGEST_STEP = 1.0
"""Maximum seconds of a timed step; if a step takes longer, fewer sequences are timed."""
TIMED_SECONDS = 2.0
MOST_STEPS, LEAST_STEPS = 20, 3
SPARE_MEMORY = 0.5
"""Maximum share of this machine's free memory that training may need for steps to be run here."""
ALONE = MeshLayout()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a worker: bytes by field of `JobEstimate`, seconds and FLOPs of a step, and how measured."""

    sizes: dict[str, int]
    seconds: float
    flops: float
    how: str


def estimated(config: TrainingConfig, home: Path) -> JobEstimate:
    """Return the estimate of a validated configuration; raises the errors of loading its data and model."""
    dataset = distilled(load_dataset(config, home, _silent), config, home)
    device, process = resolve_device(config.device), _process_bytes()
    whole = _shapes(config, dataset, home)
    trained = sum(parameter.numel() for parameter in whole.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in whole.parameters()) - trained
    layout, optimizer, steps = MeshLayout.of(config), config.optimizer, config.optimizer.steps
    plain, allowed = _priced(config, dataset)
    spared = 8 * trained - state_bytes(whole) if optimizer.optim == "adamw_8bit" else 0
    worker = _worker_measurements(config, dataset, home, TRAINING_BYTES * trained + 4 * frozen, spared)
    checkpoint = CHECKPOINT_BYTES * trained - spared
    # Checkpoints are written from a copy of the state in memory.
    process += checkpoint // layout.dp_shard
    return JobEstimate(
        device=str(device),
        workers=layout.workers,
        steps=steps,
        sequences_per_step=optimizer.batch_size * optimizer.gradient_accumulation_steps,
        tokens_per_step=optimizer.gradient_accumulation_steps * _targets(config, dataset),
        parameters=trained + frozen,
        trained_parameters=trained,
        flops=steps * (plain or worker.flops * layout.workers),
        allowed_flops=steps * allowed,
        process_bytes=process,
        memory_bytes=sum(worker.sizes.values()) + (process if device.type == "cpu" else 0),
        checkpoint_bytes=checkpoint,
        checkpoints=-(-steps // config.checkpoint.save_steps),
        disk_bytes=checkpoint * (config.checkpoint.save_total_limit + 1) + 4 * trained,
        seconds_per_step=worker.seconds,
        seconds=steps * worker.seconds,
        timed=worker.how,
        **worker.sizes,
    )


def _process_bytes() -> int:
    """Return the resident bytes of this process after one update, as torch's optimizers then import the compiler."""
    nothing = nn.Parameter(torch.zeros(1))
    nothing.grad = torch.zeros(1)
    torch.optim.AdamW([nothing], fused=True).step()
    size: int = psutil.Process().memory_info().rss
    return size


def _worker_measurements(config: TrainingConfig, dataset: Dataset, home: Path, needed: int, spared: int) -> Measured:
    """Measure steps of one worker on this machine; if memory is too small for them, use the weights' size alone.

    `needed` bytes, less the `spared` ones of moments that are smaller than in float32, are those of weights, gradients
    and moments.
    """
    weights, needed = needed // TRAINING_BYTES * 4, needed - spared
    free = psutil.virtual_memory().available
    layout = MeshLayout.of(config)
    if needed > SPARE_MEMORY * free and resolve_device(config.device).type == "cpu":
        sizes = {"weight_bytes": weights, "gradient_bytes": weights, "optimizer_bytes": 2 * weights - spared}
        how = f"no step was run, as {needed} bytes are needed and {free} are free: activations and times are not known"
        return Measured(sizes=sizes, seconds=0.0, flops=0.0, how=how)
    probe = StepProbe(config, dataset, lambda: _built(config, dataset, home))
    rows = max(1, config.optimizer.batch_size // layout.dp)
    found = measured(probe, rows, layout, exact=config.data.format != "text")
    alone = ", without the communication between workers" if layout.workers > 1 else ""
    return replace(found, how=found.how + alone)


def measured(probe: StepProbe, rows: int, layout: MeshLayout = ALONE, *, exact: bool = False) -> Measured:
    """Measure the steps of a worker with `rows` sequences, with fewer of them if steps are slow, unless `exact`.

    Measurements with fewer sequences are extrapolated linearly: only weights, gradients and moments do not grow.
    """
    first = rows if exact else 1
    probe.peak_bytes(first)
    (one,) = probe.seconds(first, 1)
    run = rows if exact else max(min(2, rows), min(rows, int(first * LONGEST_STEP / one)))
    probe.seconds(run, 1)
    (begun,) = probe.seconds(run, 1)
    steps = max(LEAST_STEPS, min(MOST_STEPS, int(TIMED_SECONDS / begun)))
    seconds = statistics.median(probe.seconds(run, steps))
    flops, peak = float(probe.flops(run)), float(probe.peak_bytes(run))
    how = f"{steps} steps of {run} rows in {seconds:.3g} s each on this machine, {torch.get_num_threads()} threads"
    if run < rows:
        half = max(1, run // 2)
        slower = statistics.median(probe.seconds(half, LEAST_STEPS))
        peak += (rows - run) * (peak - probe.peak_bytes(half)) / (run - half)
        # Noise, such as other processes, could make the slope negative.
        seconds += (rows - run) * max((seconds - slower) / (run - half), 0.5 * seconds / run)
        flops *= rows / run
        how += f", extrapolated to {rows} rows"
    return Measured(sizes=_sizes(probe, int(peak), layout), seconds=seconds, flops=flops, how=how)


def _built(config: TrainingConfig, dataset: Dataset, home: Path) -> nn.Module:
    made: nn.Module = (
        build_model(config, dataset) if config.model.base_model is None else load_base(config, home, _silent).model
    )
    return made


def _sizes(probe: StepProbe, peak: int, layout: MeshLayout) -> dict[str, int]:
    """Return the bytes of one worker by field of `JobEstimate`; sharded blocks count as a shard and one whole block."""
    model = probe.model
    weights, gradients = weight_bytes(model), trained_bytes(model)
    state = max(0, probe.kept_bytes - weights)
    activations = max(0, peak - weights - gradients - state)
    if layout.dp_shard > 1:
        blocks = [weight_bytes(block) for block in blocks_of(model)]
        away, largest = sum(blocks) * (1 - 1 / layout.dp_shard), max(blocks)
        share = away / weights
        weights, gradients, state = (int(size * (1 - share)) for size in (weights, gradients, state))
        activations += 2 * largest
    return {
        "weight_bytes": weights,
        "gradient_bytes": gradients,
        "optimizer_bytes": state,
        "activation_bytes": activations,
    }


def _shapes(config: TrainingConfig, dataset: Dataset, home: Path) -> nn.Module:
    """Return the model, with its adapter if it has one, on the meta device."""
    with shapes_only():
        if config.model.base_model is None:
            family, made = configured(config.model, dataset.model_fields)
            built: nn.Module = family.build(made)
            return built
        base, adapter = shapes_of_base(config, home)
        if adapter is not None:
            base.requires_grad_(requires_grad=False)
            base.add_module("adapter", adapter)
    return base


def _targets(config: TrainingConfig, dataset: Dataset) -> float:
    task = dataset.task(config)
    if isinstance(task, OnPolicyTask):
        return task.most_targets
    return statistics.mean(batch_weight(task, task.next_batch()) for _ in range(SAMPLED_BATCHES))


def _priced(config: TrainingConfig, dataset: Dataset) -> tuple[float, float]:
    """Return the FLOPs of a step, with all query-key pairs and with allowed pairs only; 0 if they are not known."""
    if config.model.base_model is not None:
        return 0.0, 0.0
    try:
        price = step_price(config, dataset)
    except Incompatible:
        return 0.0, 0.0
    return price.plain_flops, price.flops


def _silent(_line: str) -> None:
    """Discard a log line of loading."""


def main() -> None:
    """Answer the request on standard input."""
    spin_briefly()
    request = json.load(sys.stdin)
    keep_freed_memory()
    torch.set_num_threads(request["threads"])
    config = TrainingConfig.from_mapping(request["config"])
    answer: dict[str, Any]
    try:
        answer = {"estimate": msgspec.to_builtins(estimated(config, Path(request["home"])))}
    except Exception as error:  # noqa: BLE001 -- whatever a mechanism raises is the job's error
        answer = {"error": msgspec.to_builtins(JobError.of(as_attn_error(error)))}
    sys.stdout.write("\n" + json.dumps(answer))


async def estimated_apart(config: TrainingConfig, home: Path, threads: int) -> JobEstimate:
    """Run `estimated` in a separate process, which is killed if this task is cancelled.

    Raises the errors that it raised, `DeadlineExceeded` after `LONGEST_ESTIMATE` seconds, and `Unavailable` if the
    process cannot be started.
    """
    request = {"config": msgspec.to_builtins(config), "home": str(home), "threads": threads}
    program = [sys.executable, "-m", "attn_train.estimate"]
    pipe = asyncio.subprocess.PIPE
    with starting("the estimate"):
        process = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(LONGEST_ESTIMATE):
            output, errors = await process.communicate(json.dumps(request).encode())
    except TimeoutError:
        raise DeadlineExceeded(f"the job could not be estimated within {LONGEST_ESTIMATE:g} seconds") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        exit_status = f"the process ended with {process.returncode}"
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or [exit_status]
        raise InternalError(f"the job could not be estimated: {last[0]}")
    answer = json.loads(output.splitlines()[-1])
    if "error" in answer:
        raise msgspec.convert(answer["error"], JobError).error()
    return msgspec.convert(answer["estimate"], JobEstimate)


if __name__ == "__main__":
    main()
