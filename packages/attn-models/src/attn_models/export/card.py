"""The model card of an exported folder: the README.md that Hugging Face's hub shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from attn_core import Shape, state_bytes
from attn_schema.decoder import DecoderConfig

from attn_models.attention import layer_attentions
from attn_models.loading import LoadedModel
from attn_models.weights.manifest import TRAINING

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- attn
- {layout}
---

# {name}

A model made with attn {version}, in the layout of `{layout}`:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
```

| | |
|---|---|
{rows}
"""


def model_card(loaded: LoadedModel, layout: str, origin: Mapping[str, Any]) -> str:
    """The card of a model in a layout: its mechanisms and their price, its size, and how it was trained.

    `origin` is the `source` of the manifest of the model's folder.
    """
    counted = Counter(name.rpartition("/")[2] for name in loaded.mechanisms)
    facts: dict[str, Any] = {
        "mechanism": ", ".join(f"{name} ({count} layers)" for name, count in counted.items()),
        "parameters": f"{loaded.parameters:,}",
        "context": f"{loaded.model.max_seq_len:,} tokens",
        **(_price(loaded.config) if isinstance(loaded.config, DecoderConfig) else {}),
    }
    trained = origin.get(TRAINING)
    if isinstance(trained, Mapping):
        facts |= {str(name).replace("_", " "): value for name, value in trained.items()}
    rows = "\n".join(f"| {name} | {str(value).replace('|', '/')} |" for name, value in facts.items())
    return CARD.format(layout=layout, name=loaded.path.name, version=version("attn-models"), rows=rows)


def _price(config: DecoderConfig) -> dict[str, str]:
    """The FLOPs of attention for a text as long as the context, and the size of its state."""
    tokens, layers = config.max_seq_len, layer_attentions(config)
    costs = [layer.mechanism.cost(layer.config, Shape(query=tokens, key=tokens)) for layer in layers]
    states = [state_bytes(layer.states, tokens=tokens, dtype="bfloat16") for layer in layers]
    return {
        f"attention, {tokens:,} tokens": f"{sum(cost.flops for cost in costs):,} FLOPs",
        f"state after {tokens:,} tokens, bfloat16": f"{sum(states):,} bytes",
    }
