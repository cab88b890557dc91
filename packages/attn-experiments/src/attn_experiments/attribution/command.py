"""`attn attribute`: the tokens that an output depends on, according to several methods side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_models.loading import load_model
from attn_models.sources.store import ModelStore
from attn_schema.output import Json, print_json, print_table, waiting
from rich.console import Console
from torch import Tensor, nn

from attn_experiments.attribution.comparison import kendall_tau
from attn_experiments.attribution.methods import (
    Attribution,
    attention_maps,
    converged_gradients,
    embedding_of,
    mean_embedding,
    next_token_score,
    rollout,
    shapley_values,
)
from attn_experiments.attribution.text_map import as_html, coloured, visible

METHODS = ("attention", "rollout", "integrated_gradients", "shapley")
Methods = Annotated[list[str] | None, typer.Option(help=f"{', '.join(METHODS)}; may be repeated. All by default.")]


def attribute_command(
    *,
    model: Annotated[str, typer.Argument(help="A decoder, by name or folder.")],
    text: Annotated[str, typer.Argument(help="What the model reads.")],
    next_token: Annotated[
        str | None, typer.Option(help="Token to explain; by default the most likely next one.")
    ] = None,
    method: Methods = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with the coloured text.")] = None,
    json: Json = False,
) -> None:
    """Show which tokens the next one depends on: attention, rollout, integrated gradients, Shapley values.

    Red tokens make it more likely, blue ones less. Attention and rollout are the weights of the last token's query, in
    the last layer and through all layers; the others are contributions to the log-probability, relative to a baseline
    of the mean embedding; they sum to the change of the log-probability, but for the error that is shown.

    Example: `attn attribute smollm2-135m-instruct "The capital of France is" --html why.html`
    """
    chosen = tuple(dict.fromkeys(method or METHODS))
    for name in chosen:
        if name not in METHODS:
            raise UnknownName.of("method", name, METHODS)
    folder = ModelStore().find(model)
    with waiting(f"reading with {model}") as say:
        found, tokens, title = explained(folder, model, text, next_token, chosen, say)
    show(found, tokens, title, html, json)


def explained(
    folder: Path, model: str, text: str, next_token: str | None, chosen: tuple[str, ...], say: Callable[[str], None]
) -> tuple[dict[str, Attribution], list[str], str]:
    """What `attributed` finds for a text, its tokens, and the text with the token that is explained.

    Raises `Incompatible` for a model that is no decoder, `InvalidValue` for a text or a token that is not allowed.
    """
    loaded = load_model(folder)
    if loaded.tokenizer is None or loaded.max_encoder_len is not None or not hasattr(loaded.model, "embedding"):
        raise Incompatible(f"{model} is not a decoder with a tokenizer", model=model)
    ids = loaded.tokenizer.encode(text)
    if not ids:
        raise InvalidValue.of("text", text, "at least one token")
    target = wanted(loaded, next_token, ids)
    found = attributed(loaded.model, torch.tensor(ids), target, chosen, say)
    tokens = [visible(loaded.tokenizer.decode([token], skip_special=False)) for token in ids]
    return found, tokens, f"{text}{loaded.tokenizer.decode([target])}"


def wanted(loaded: Any, given: str | None, ids: list[int]) -> int:
    """The id of the target token: that of the text `given`, else the most likely next token.

    Raises `InvalidValue` if the text is not exactly one token.
    """
    if given is None:
        with torch.inference_mode():
            return int(loaded.model(torch.tensor([ids]))[0, -1].argmax())
    found = loaded.tokenizer.encode(given, add_special=False)
    if len(found) != 1:
        raise InvalidValue.of("--next-token", given, f"one token; this is {len(found)}")
    return int(found[0])


def attributed(
    model: nn.Module, tokens: Tensor, target: int, chosen: tuple[str, ...], say: Callable[[str], None] = lambda _: None
) -> dict[str, Attribution]:
    """The contribution of each token, by method; those of attention are no parts of a sum and have no error (nan).

    `say` is called with the name of each method before it is computed.
    """
    model.requires_grad_(requires_grad=False)
    embedding = embedding_of(model)
    rows = embedding(tokens).detach()
    score, nothing = next_token_score(model, tokens, target), mean_embedding(model, tokens)
    methods: dict[str, Callable[[], Attribution]] = {
        "attention": lambda: Attribution(attention_maps(model, tokens)[-1].mean(0)[-1], math.nan),
        "rollout": lambda: Attribution(rollout(attention_maps(model, tokens))[-1], math.nan),
        "integrated_gradients": lambda: converged_gradients(score, rows, nothing),
        "shapley": lambda: shapley_values(score, rows, nothing),
    }
    found = {}
    for name in chosen:
        say(name)
        found[name] = methods[name]()
    return {name: Attribution(one.shares.float(), one.missing) for name, one in found.items()}


def show(found: dict[str, Attribution], tokens: list[str], title: str, page: Path | None, json: bool) -> None:  # noqa: FBT001
    """Print the coloured text, sums and the methods' agreement, and write the HTML page if `page` is given."""
    values = {name: one.shares for name, one in found.items()}
    shares = {name: one.tolist() for name, one in values.items()}
    sums = {
        name: {"sum": float(one.shares.sum()), "error": one.missing}
        for name, one in found.items()
        if not math.isnan(one.missing)
    }
    agreements = [
        {"methods": f"{one} and {other}", "kendall_tau": round(kendall_tau(values[one].abs(), values[other].abs()), 2)}
        for place, one in enumerate(values)
        for other in list(values)[place + 1 :]
    ]
    if page is not None:
        caption = "Red tokens make the next one more likely, blue ones less; below each is its number."
        try:
            page.write_text(as_html(tokens, shares, title, caption), "utf-8")
        except OSError as error:
            raise InvalidValue.of("--html", str(page), f"a file that can be written ({error})") from error
    if json:
        print_json({"tokens": tokens, "shares": shares, "sums": sums, "agreements": agreements})
        return
    console = Console()
    console.print(f"Next token: {title}", markup=False, highlight=False)
    if console.color_system is not None:
        for name, each in shares.items():
            console.print(f"\n{name}", highlight=False)
            console.print(coloured(tokens, each))
    typer.echo("")
    numbers: list[dict[str, Any]] = [
        {"token": token, **{name: f"{each[place]:+.2f}" for name, each in shares.items()}}
        for place, token in enumerate(tokens)
    ]
    numbers += [
        {"token": row, **{name: f"{sums[name][row]:+.3g}" if name in sums else None for name in shares}}
        for row in ("sum", "error")
    ]
    print_table(numbers, "")
    typer.echo("")
    rows = [{"methods": row["methods"], "Kendall's τ": f"{row['kendall_tau']:.2f}"} for row in agreements]
    print_table(rows, "one method alone is compared with nothing")
    if page is not None:
        typer.echo(str(page))
