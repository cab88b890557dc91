"""The table of supported model families, with the difference of their logits from those of transformers.

    python tools/model_families.py            measure, and print the table
    python tools/model_families.py --write    measure, and write it into packages/attn-models/README.md

The families are those of the registry. Decoders with tiny configs are measured in float32, on whole sequences and in
steps of a few tokens, with large random weights; the logits have magnitudes of about 1 to 10.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import workspace
from attn_models.adapters.base import EncoderAdapter, Layout, StateDictAdapter
from attn_models.adapters.native import LAYOUTS, NativeAdapter
from attn_models.adapters.registry import our_adapters
from attn_models.loading import load_model
from attn_models.weights.gguf_joined import JOINED_FAMILIES
from attn_models.weights.gguf_table import GGUF_FAMILIES
from attn_testing.families import FAMILIES
from attn_testing.memory import stepped_logits

README = workspace.ROOT / "packages" / "attn-models" / "README.md"
BEGIN, END = "<!-- families: python tools/model_families.py --write -->", "<!-- end of families -->"
ELSEWHERE = {"olmo3": "olmo2", "qwen3_next": "qwen3next"}
"""The architectures of plugins whose files hold families of this package."""
READ = (*GGUF_FAMILIES, *JOINED_FAMILIES)
GGUF = {name: family.name for family in READ for name in (family.model_type, *family.relatives)} | ELSEWHERE
HEADER = "| `model_type` | kind | GGUF | largest difference to transformers | file, lines |\n|---|---|---|---|---|"


def adapters() -> list[Layout]:
    """The weight layouts of other libraries, sorted by model type."""
    own = {NativeAdapter.model_type, *LAYOUTS}
    return sorted(
        (one for one in our_adapters() if not one.model_type.startswith("attn") and one.model_type not in own),
        key=lambda one: one.model_type,
    )


def peers(family: str) -> Iterator[Any]:
    """Models of the transformers library with random weights, one for each tiny config of a family."""
    import transformers

    for sizes in FAMILIES[family].values():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **sizes)
        build: Any = transformers.AutoModelForCausalLM.from_config
        model = build(config, attn_implementation="eager").float().eval()
        for name, parameter in model.named_parameters():
            parameter.data.normal_(mean=float("norm" in name or "ln_" in name), std=0.2)
        yield model


@torch.no_grad()
def difference(family: str) -> float:
    """The largest absolute difference of logits, over all tiny configs of a family."""
    found = 0.0
    for peer in peers(family):
        with tempfile.TemporaryDirectory() as folder:
            peer.save_pretrained(folder)
            model, tokens = load_model(folder).model, torch.randint(61, (20,))
            theirs = peer(tokens[None]).logits[0]
            for ours in (model(tokens[None])[0], stepped_logits(model, tokens, [6, 9, 1, 1, 1, 1, 1])):
                found = max(found, (ours - theirs).abs().max().item())
    return found


def row(adapter: Layout) -> str:
    """The table row of one family; for families that are not measured here, it refers to their own tests."""
    family = adapter.model_type
    decoder = isinstance(adapter, StateDictAdapter)
    kind = "decoder" if decoder else "encoder" if isinstance(adapter, EncoderAdapter) else "images"
    apart = f"{difference(family):.1e}" if family in FAMILIES else "in its own tests"
    return f"| `{family}` | {kind} | {GGUF.get(family, '')} | {apart} | {source(adapter)} |"


def source(adapter: Layout) -> str:
    """The file that describes a family, and its number of lines; several families may share a file."""
    path = Path(inspect.getfile(type(adapter)))
    return f"{path.name}, {len(path.read_text('utf-8').splitlines())}"


def table() -> str:
    """The table of all families."""
    return "\n".join([HEADER, *(row(adapter) for adapter in adapters())])


def main() -> None:
    """Print the table, and with --write write it into the README."""
    import transformers

    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = table()
    print(found)
    if "--write" in sys.argv[1:]:
        text = README.read_text("utf-8")
        before, rest = text.split(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{found}\n{rest[rest.index(END) :]}", "utf-8")


if __name__ == "__main__":
    main()
