"""What does a LoRA adapter of SmolLM2 learn on a CPU in minutes, and can it be served together with its base model?

    python benchmarks/lora_cpu.py                # ATTN_HOME has smollm2-135m-instruct (attn pull)

The task is synthetic: chat messages that order something, to be answered with a JSON object of six fields. The adapter
is trained by a job over gRPC as with `attn train --from smollm2-135m-instruct --lora-rank 8 --format chat`; then base
and adapter are loaded into one engine, and both answer held-out orders, greedily and in the same batches. An answer is
correct if its object equals the expected one, a field if its value does. The words of held-out orders occur in the
training data, the orders themselves do not. The result, with the machine and its load, is written to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attn_client import AsyncClient, ClientSettings
from attn_engine.client import EngineClient
from attn_engine.in_process import InProcess
from attn_gateway import Cluster, ClusterSettings, serving
from attn_schema import ChatMessage, EngineConfig, SamplingParams
from attn_schema.finetuning import LoraConfig
from attn_schema.home import home_folder, models_folder
from attn_schema.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    JobEvent,
    JobState,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_serve.service import InferenceGrpc
from attn_train.service import TrainingGrpc
from attn_train.settings import TrainSettings
from report import write_report

BASE, JOB = "smollm2-135m-instruct", "orders"
SYSTEM = "Answer with the order as JSON."
TRAINING, HELD_OUT, AT_ONCE = 1200, 60, 6
WORDS = {
    "quantity": tuple(range(2, 60)),
    "colour": ("red", "green", "blue", "white", "black", "yellow", "grey", "brown", "purple", "orange"),
    "item": ("lamps", "chairs", "boxes", "cups", "shirts", "bottles", "tables", "bags", "books", "pens", "hats"),
    "name": ("Anna", "Omar", "Lena", "Paul", "Ines", "Noah", "Mira", "Hugo", "Sara", "Finn", "Ada", "Ravi"),
    "city": ("Bonn", "Lyon", "Turin", "Graz", "Porto", "Malmo", "Gent", "Basel", "Split", "Krakow"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
}
FORMS = (
    "Please send {quantity} {colour} {item} to {name} in {city} by {day}.",
    "{name} from {city} needs {quantity} {item} in {colour} until {day}.",
    "By {day} we want {quantity} {colour} {item} delivered to {city}, for {name}.",
    "Could {name} get {quantity} {item}, {colour} ones, in {city} on {day}?",
)


def orders(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Distinct random sentences, each with the object that is the correct answer."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        values = {name: draw.choice(words) for name, words in WORDS.items()}
        found[draw.choice(FORMS).format(**values)] = values
    return list(found.items())


def messages(sentence: str) -> list[dict[str, str]]:
    """The chat messages before the answer."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sentence}]


def write_dataset(path: Path, texts: list[tuple[str, dict[str, Any]]]) -> None:
    """Write the conversations as JSON lines."""
    answers = [{"role": "assistant", "content": json.dumps(values)} for _, values in texts]
    lines = [{"messages": [*messages(said), answer]} for (said, _), answer in zip(texts, answers, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def training_config(dataset: Path, given: argparse.Namespace) -> TrainingConfig:
    """The configuration that `attn train` would submit."""
    return TrainingConfig(
        model=ModelConfig(base_model=BASE, max_seq_len=160),
        data=DataConfig(dataset=str(dataset), format="chat", validation_fraction=0.05),
        optimizer=OptimizerConfig(
            steps=given.steps, batch_size=4, learning_rate=1e-3, warmup_steps=10, weight_decay=0.0
        ),
        lora=LoraConfig(lora_rank=8),
        checkpoint=CheckpointConfig(save_steps=100),
        evaluation=EvaluationConfig(logging_steps=10, eval_steps=100, eval_batches=8),
        seed=7,
    )


def folder_bytes(folder: Path) -> int:
    """The total size of the files in a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.iterdir())


async def train(client: AsyncClient, config: TrainingConfig) -> dict[str, Any]:
    """Run the training job; returns its losses and its time in seconds."""
    began = time.perf_counter()
    job = await client.jobs.submit(config, job_id=JOB)
    async for event in client.jobs.watch(job.id):
        if isinstance(event, JobEvent) and event.log is not None:
            print(event.log.text, flush=True)
        if isinstance(event, JobEvent) and event.metrics is not None:
            print(event.metrics.step, event.metrics.values, flush=True)
    job = await client.jobs.get(job.id)
    if job.state is not JobState.SUCCEEDED:
        raise SystemExit(f"the job is {job.state}: {job.error}")
    size = folder_bytes(Path(job.model_path))
    seconds = round(time.perf_counter() - began, 1)
    known = {name: round(value, 4) for name, value in job.last_metrics.items()}
    return {"what": "training", "seconds": seconds, "steps": job.step, "adapter_bytes": size, **known}


async def answer(client: AsyncClient, model: str, sentence: str) -> str:
    """The greedy answer of a model to a sentence."""
    prompt = [ChatMessage(**message) for message in messages(sentence)]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=64)
    return "".join([delta.text async for delta in client.generate(model, prompt, sampling)])


def judged(said: str, wanted: dict[str, Any]) -> tuple[bool, float]:
    """Whether an answer is correct, and the fraction of its fields that are."""
    try:
        found = json.loads(said)
    except ValueError:
        return False, 0.0
    if not isinstance(found, dict):
        return False, 0.0
    return found == wanted, sum(found.get(name) == value for name, value in wanted.items()) / len(wanted)


async def evaluate(client: AsyncClient, held_out: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Evaluate both models on the same orders, in batches with requests to both."""
    names, said = (BASE, JOB), dict[str, list[tuple[bool, float]]]()
    began = time.perf_counter()
    for start in range(0, len(held_out), AT_ONCE):
        asked = [(name, *order) for order in held_out[start : start + AT_ONCE] for name in names]
        answers = await asyncio.gather(*(answer(client, name, sentence) for name, sentence, _ in asked))
        for (name, _, wanted), given in zip(asked, answers, strict=True):
            said.setdefault(name, []).append(judged(given, wanted))
    seconds = round(time.perf_counter() - began, 1)
    return [
        {
            "what": "held out",
            "model": name,
            "orders": len(found),
            "right": round(sum(right for right, _ in found) / len(found), 3),
            "fields_right": round(sum(share for _, share in found) / len(found), 3),
            "seconds_of_both": seconds,
        }
        for name, found in said.items()
    ]


class InProcessInference(InferenceGrpc):
    """The inference service with engines in this process."""

    async def start(self) -> None:
        """Do nothing: models are only loaded on request."""

    def _engine(self, name: str, folder: Path, config: EngineConfig) -> EngineClient:  # noqa: ARG002 -- as its base
        return InProcess(folder, config)


async def measured(given: argparse.Namespace, home: Path) -> list[dict[str, Any]]:
    """Train the adapter, serve both models and evaluate them; returns the rows of the result."""
    texts = orders(TRAINING + HELD_OUT, 11)
    write_dataset(home / "orders.jsonl", texts[:TRAINING])
    cluster = Cluster(ClusterSettings(home=home))
    services = [
        TrainingGrpc(cluster, TrainSettings(threads=given.threads, data_roots=(home, models_folder(home_folder())))),
        InProcessInference(cluster),
    ]
    async with serving(services) as gateway, AsyncClient(ClientSettings(address=gateway.address)) as client:
        rows = [await train(client, training_config(home / "orders.jsonl", given))]
        await client.models.load(BASE)
        await client.models.load(JOB)
        rows += await evaluate(client, texts[TRAINING:])
        print([(model.name, model.base_model) for model in await client.models.list()])
    return rows


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the result, measured in a temporary home folder that links to the base model."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        models_folder(home).mkdir(parents=True)
        (models_folder(home) / BASE).symlink_to(models_folder(home_folder()) / BASE)
        yield from asyncio.run(measured(given, home))


def main() -> None:
    """Run the benchmark and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    facts = {"question": (__doc__ or "").partition("\n")[0], "lora_rank": 8, "batch_size": 4, "threads": given.threads}
    write_report("lora-cpu", facts, rows(given), given.out)


if __name__ == "__main__":
    main()
