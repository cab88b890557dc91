"""`attn attribute`: the tokens that an output depends on, according to several methods side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_models.encoder.encoder import TextClassifier
from attn_models.loading import load_model
from attn_models.loading.encoders import is_text_classifier, load_classifier
from attn_models.sources.store import ModelStore
from attn_models.tokenizers import Tokenizer
from attn_schema.output import Json, print_json, print_table, waiting
from rich.console import Console
from torch import Tensor, nn

from attn_experiments.attribution.comparison import kendall_tau
from attn_experiments.attribution.methods import (
    Attribution,
    Score,
    attention_maps,
    converged_gradients,
    embedding_of,
    label_score,
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
    model: Annotated[str, typer.Argument(help="A decoder or a text classifier, by name or folder.")],
    text: Annotated[str, typer.Argument(help="What the model reads.")],
    target: Annotated[
        str | None, typer.Option(help="Next token or label to explain; by default the most likely one.")
    ] = None,
    method: Methods = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with the coloured text.")] = None,
    json: Json = False,
) -> None:
    """Show which tokens the next one, or a label, depends on: attention, rollout, integrated gradients, Shapley values.

    Red tokens make it more likely, blue ones less. Attention and rollout are the weights of the last token's query, or
    of a classifier's, in the last layer and through all layers; the others are contributions to the log-probability,
    relative to a baseline of the mean embedding; they sum to the change of the log-probability, but for the error that
    is shown.

    Example: `attn attribute smollm2-135m-instruct "The capital of France is" --html why.html`, `attn attribute
    my-classifier "did you see it" --method attention`
    """
    chosen = tuple(dict.fromkeys(method or METHODS))
    for name in chosen:
        if name not in METHODS:
            raise UnknownName.of("method", name, METHODS)
    folder = ModelStore().find(model)
    read = read_by_classifier if is_text_classifier(folder) else read_by_decoder
    with waiting(f"reading with {model}") as say:
        explained = read(folder, text, target)
        found = attributed(explained, chosen, say)
    show(found, explained.words, explained.title, html, json)


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """An output to explain: `tokens` [tokens] and their texts, the `score` of their embeddings, and as functions the
    weights [tokens] that say what it attends to, in the last layer and through all; `title` says the output."""

    model: nn.Module
    tokens: Tensor
    words: list[str]
    score: Score
    attention: Callable[[], Tensor]
    rollout: Callable[[], Tensor]
    title: str


def read_by_decoder(folder: Path, text: str, target: str | None) -> Explained:
    """The next token of a text, the most likely one or `target`, which raises `InvalidValue` unless it is one token."""
    loaded = load_model(folder)
    if loaded.tokenizer is None or loaded.max_encoder_len is not None or not hasattr(loaded.model, "embedding"):
        raise Incompatible(f"{folder} is neither a decoder with a tokenizer nor a text classifier", model=str(folder))
    model, tokens = loaded.model, tokens_of(text, loaded.tokenizer)
    with torch.inference_mode():
        wanted = [int(model(tokens[None])[0, -1].argmax())]
    if target is not None:
        wanted = loaded.tokenizer.encode(target, add_special=False)
    if len(wanted) != 1:
        raise InvalidValue.of("--target", target, f"one token; this is {len(wanted)}")
    return Explained(
        model=model,
        tokens=tokens,
        words=words_of(tokens, loaded.tokenizer),
        score=next_token_score(model, tokens, wanted[0]),
        attention=lambda: attention_maps(model, tokens)[-1].mean(0)[-1],
        rollout=lambda: rollout(attention_maps(model, tokens))[-1],
        title=f"Next token: {text}{loaded.tokenizer.decode(wanted)}",
    )


def read_by_classifier(folder: Path, text: str, target: str | None) -> Explained:
    """The label of a text, the most likely one or `target`, which raises `UnknownName` for one that there is not."""
    loaded, labels, tokenizer = load_classifier(folder)
    model = cast("TextClassifier", loaded)
    tokens = tokens_of(text, tokenizer)
    with torch.inference_mode():
        chances = model(tokens[None])[0, 0].softmax(-1)
    if target is not None and target not in labels:
        raise UnknownName.of("label", target, labels)
    named = int(chances.argmax()) if target is None else labels.index(target)

    def weights() -> Tensor:
        with torch.no_grad():
            found: Tensor = model.weights(tokens[None])[0]
        return found

    return Explained(
        model=model,
        tokens=tokens,
        words=[f"{word} " for word in words_of(tokens, tokenizer)],
        score=label_score(model, tokens, named),
        attention=weights,
        rollout=lambda: weights() @ rollout(attention_maps(model.encoder, tokens)),
        title=f"{labels[named]} ({chances[named]:.0%}): {text}",
    )


def tokens_of(text: str, tokenizer: Tokenizer) -> Tensor:
    """The tokens [tokens] of a text; raises `InvalidValue` if there are none."""
    ids = tokenizer.encode(text)
    if not ids:
        raise InvalidValue.of("text", text, "at least one token")
    return torch.tensor(ids)


def words_of(tokens: Tensor, tokenizer: Tokenizer) -> list[str]:
    """The text of each token."""
    return [visible(tokenizer.decode([token], skip_special=False)) for token in tokens.tolist()]


def attributed(
    explained: Explained, chosen: tuple[str, ...], say: Callable[[str], None] = lambda _: None
) -> dict[str, Attribution]:
    """The contribution of each token, by method; those of attention are no parts of a sum and have no error (nan).

    `say` is called with the name of each method before it is computed.
    """
    model, score = explained.model.requires_grad_(requires_grad=False), explained.score
    rows, nothing = embedding_of(model)(explained.tokens).detach(), mean_embedding(model, explained.tokens)
    methods: dict[str, Callable[[], Attribution]] = {
        "attention": lambda: Attribution(explained.attention(), math.nan),
        "rollout": lambda: Attribution(explained.rollout(), math.nan),
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
        caption = "Red tokens make it more likely, blue ones less; below each is its number."
        try:
            page.write_text(as_html(tokens, shares, title, caption), "utf-8")
        except OSError as error:
            raise InvalidValue.of("--html", str(page), f"a file that can be written ({error})") from error
    if json:
        print_json({"tokens": tokens, "shares": shares, "sums": sums, "agreements": agreements})
        return
    console = Console()
    console.print(title, markup=False, highlight=False)
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
