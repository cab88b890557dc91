"""Writes docs/foreign-tools.md: which recipe opens in transformers, trained here, fine-tuned there and brought back.

    python tools/foreign_recipes.py PYTHON      PYTHON is that of an environment with transformers

`nox -s foreign` makes the environment and runs all. Every decoder's recipe is trained for 20 steps and exported; there
its logits and greedy tokens are compared with those here, and it is trained for 5 steps; here they are compared again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import workspace
from attn_cli.recipe import read_recipe, recipe_names
from attn_core.errors import UserError
from attn_models.export import export_model
from attn_models.loading import load_model
from attn_models.tokenizers import Tokenizer
from attn_schema.codec import from_message, to_message
from attn_schema.training import TrainingConfig
from attn_train.data.load import load_dataset
from attn_train.model import resolved
from attn_train.records import StopFlag
from attn_train.trainer import Trainer
from attn_train.worker import build_model
from safetensors.torch import load_file

PAGE = workspace.ROOT / "docs" / "foreign-tools.md"
TEXT = "To be, or not to be, that is the question: whether tis nobler in the mind to suffer\n" * 60
STEPS, TUNED, GREEDY = 20, 5, 6
THERE = """
import sys, json, torch, transformers
from safetensors.torch import save_file
folder, answers, tuned, steps, greedy = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokens = torch.tensor(json.loads(sys.argv[6]))
with torch.no_grad():
    found = {"before": model(tokens).logits}
    model.generation_config.eos_token_id = None
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": greedy, "do_sample": False}
    found["greedy"] = model.generate(tokens, **options)
optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
for _ in range(steps):
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    found["after"] = model.eval()(tokens).logits
model.save_pretrained(tuned)
save_file({name: each.contiguous() for name, each in found.items()}, answers)
print(json.dumps([type(model).__name__, transformers.__version__, torch.__version__]))
"""


def main() -> None:
    """Write the page."""
    python, rows, versions = sys.argv[1], [], ""
    for name in recipe_names():
        if read_recipe(name).model.family == "decoder":
            with TemporaryDirectory() as folder:
                row, versions = compared(name, Path(folder), python, versions)
            print(row, flush=True)
            rows.append(row)
    written = f"Written by `nox -s foreign` with {versions}."
    lines = ["# Recipes in transformers", "", SAID, "", written, "", *HEAD, *rows]
    PAGE.write_text("\n".join(lines) + "\n", "utf-8")


SAID = f"""Every decoder's recipe, trained for {STEPS} steps on a small text and exported by `attn models export`: what
it opens as in an environment without this project, the largest difference of any logit there, and of any logit here
after it was trained there for {TUNED} steps and brought back. Other recipes open with `import attn_models.hf`."""
HEAD = [
    "| recipe | opens as | logits there | greedy tokens | logits here, after it was trained there |",
    "|---|---|---|---|---|",
]


def compared(name: str, folder: Path, python: str, versions: str) -> tuple[str, str]:
    """The row of a recipe, and the versions of the other programs."""
    own = trained(name, folder)
    try:
        export_model(own, folder / "hf")
    except UserError as error:
        return f"| {name} | no: {error.message.partition(': ')[2].partition(';')[0]} | | | |", versions
    loaded = load_model(own, "float32")
    ids = Tokenizer.from_folder(own).encode(TEXT)
    tokens = torch.tensor([ids[:16], ids[5:21]])
    steps = [str(TUNED), str(GREEDY), json.dumps(tokens.tolist())]
    called = [python, "-I", "-c", THERE, *map(str, (folder / "hf", folder / "answers", folder / "tuned")), *steps]
    done = subprocess.run(called, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"| {name} | fails there: {done.stderr.strip().splitlines()[-1]} | | | |", versions
    model, *numbers = json.loads(done.stdout.splitlines()[-1])
    answers, greedy = load_file(folder / "answers"), tokens
    with torch.no_grad():
        before = (loaded.model(tokens) - answers["before"]).abs().max().item()
        for _ in range(GREEDY):
            greedy = torch.cat([greedy, loaded.model(greedy)[:, -1:].argmax(-1)], dim=1)
        after = (load_model(folder / "tuned", "float32").model(tokens) - answers["after"]).abs().max().item()
    same = "equal" if torch.equal(greedy, answers["greedy"]) else "differ"
    row = f"| {name} | {model} | {before:.0e} | {same} | {after:.0e} |"
    return row, f"transformers {numbers[0]}, torch {numbers[1]}"


class Silent:
    """A report that keeps nothing."""

    def __getattr__(self, _: str) -> Any:
        """Whatever a trainer reports."""
        return lambda *_given: None


def trained(name: str, folder: Path) -> Path:
    """A folder of the recipe's model after a few steps on a small text."""
    message = to_message(read_recipe(name))
    (folder / "words.txt").write_text(TEXT)
    if message.data.dataset == "shakespeare":
        message.data.dataset = str(folder / "words.txt")
    message.optimizer.steps, message.optimizer.batch_size, message.optimizer.warmup_steps = STEPS, 4, 1
    message.evaluation.eval_batches, message.evaluation.bleu_sentences = 1, 0
    config = resolved(from_message(TrainingConfig, message))
    dataset = load_dataset(config, folder / "home", lambda _: None)
    model: Any = build_model(config, dataset)
    Trainer(model, dataset, config).run(Silent(), StopFlag())
    return Path(dataset.save(folder / "own", model))


if __name__ == "__main__":
    main()
