"""The inputs and weights of worked examples: those of the courses where they fit, else small rounded numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attn_core import Capability, Mechanism, MechanismConfig, Slot, configure
from attn_core.errors import InvalidValue, UserError
from attn_schema.text_files import read_lines
from torch import Tensor

from attn_experiments.report import Result, Settings, judged
from attn_experiments.worked.steps import Step, steps_of

X = [[1, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]]
"""The three tokens of the courses' example."""
COURSE = {
    "query.weight": [[1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 1]],
    "key.weight": [[0, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 0]],
    "value.weight": [[0, 0, 1, 1], [2, 3, 0, 1], [0, 0, 3, 0]],
    "output.weight": [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]],
}
"""Its matrices; the output is the weighted sums of the values, and a zero."""
TOKENS, SOURCE = 3, 4
OPTIONS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "sliding_window": (7, {"window": 2}),
    "dilated_window": (7, {"window": 2, "dilations": (2,)}),
    "strided": (12, {"stride": 4}),
    "fixed": (12, {"block": 4, "summaries": 1}),
    "mla": (TOKENS, {"latent": 2, "rotary_size": 2}),
    "transmla": (TOKENS, {"latent": 2}),
    "mamba2": (TOKENS, {"state_size": 2}),
    "log_linear_mamba2": (TOKENS, {"state_size": 2, "levels": 3}),
    "linformer": (TOKENS, {"rank": 2}),
    "ntm": (TOKENS, {"slots": 4}),
}
"""The number of tokens, and the options, of examples of masks that the courses draw, and of large layers."""
SIZES = ((4, 1, 3), (4, 1, None), (4, 2, None), (8, 2, None))
"""Hidden size, heads and head size to try, in this order; None for hidden_size / heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worked:
    """A worked example: the config, the layer, its inputs [tokens, hidden_size] and its steps."""

    config: MechanismConfig
    layer: Any
    rows: Tensor
    source: Tensor | None
    steps: list[Step]

    @property
    def expected(self) -> Tensor:
        """The output [tokens, hidden_size] of the layer itself."""
        with torch.no_grad():
            given = [part[None] for part in (self.rows, self.source) if part is not None]
            out: Tensor = self.layer(*given)[0]
        return out


def worked(
    mechanism: Mechanism, options: Mapping[str, Any], *, rows: Tensor | None = None, causal: bool = False, seed: int = 0
) -> Worked:
    """Work out an example of a mechanism with these options.

    `rows` [tokens, hidden_size] are by default three tokens of the courses, or more where the mask needs them. Weights
    are those of the courses where they fit, else drawn from the seed and rounded to one digit; all is float64. See
    `built` for `causal`. Raises what `configure` does.
    """
    tokens, drawn = OPTIONS.get(mechanism.name, (TOKENS, {}))
    given = {**mechanism.sketch, **drawn, **options}
    config, layer = built(mechanism, given, rows, tokens if rows is None else len(rows), causal=causal)
    generator = torch.Generator().manual_seed(seed)
    if rows is None:
        rows = torch.tensor(X, dtype=torch.float64) if config.hidden_size == len(X[0]) and tokens == TOKENS else None
    if rows is None:
        rows = torch.randint(0, 3, (tokens, config.hidden_size), generator=generator).double()
    source = torch.randint(0, 3, (SOURCE, config.hidden_size), generator=generator).double() if config.cross else None
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            course = torch.tensor(COURSE.get(name, []), dtype=torch.float64)
            fits = course.shape == weight.shape
            weight.copy_(course if fits else weight.round(decimals=1))
    return Worked(
        config=config, layer=layer, rows=rows, source=source, steps=steps_of(mechanism, config, layer, rows, source)
    )


def built(
    mechanism: Mechanism, options: Mapping[str, Any], rows: Tensor | None, tokens: int, *, causal: bool
) -> tuple[MechanismConfig, Any]:
    """A config and its layer, float64, of the first of `SIZES` that the mechanism accepts; of the width of `rows`, for
    `tokens` tokens.

    Without `causal` there is no mask of later tokens, unless the mechanism needs it, or keeps states token by token.
    """
    refusal: UserError | None = None
    masked = mechanism.can(Capability.CAUSAL) and not mechanism.only_cross
    for hidden_size, heads, head_dim in SIZES:
        sizes: dict[str, Any] = {"hidden_size": hidden_size if rows is None else rows.shape[1], "num_heads": heads}
        sizes["max_seq_len"] = max(SOURCE, tokens)
        if head_dim is not None:
            if not mechanism.can(Capability.HEAD_DIM):
                continue
            sizes["head_dim"] = head_dim
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                config = configure(mechanism, dict(options), **sizes, causal=masked)
                recurrent = any(isinstance(state, Slot) for state in mechanism.state(config).values())
                if mechanism.can(Capability.BIDIRECTIONAL) and not (causal or recurrent or config.cross):
                    config = dataclasses.replace(config, causal=False)
                return config, mechanism.build(config).double().eval()
            except UserError as error:
                refusal = refusal or error
    raise refusal or InvalidValue.of("mechanism", mechanism.name, "one that can be built")


def read_rows(path: Path) -> Tensor:
    """The matrix [tokens, hidden_size], float64, of a text file of numbers with spaces or commas, a row on each line.

    Raises `InvalidValue` for a file that cannot be read, words that are not finite numbers, and rows of different
    lengths.
    """
    rows: list[list[float]] = []
    for number, line in enumerate(read_lines(path, "--x"), 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        try:
            rows.append([float(word) for word in words])
        except ValueError as error:
            raise InvalidValue.of("--x", f"{path}, line {number}: {line[:60]!r}", "numbers") from error
        if len(words) != len(rows[0]):
            allowed = f"{len(rows[0])} numbers, as in the first row"
            raise InvalidValue.of("--x", f"{path}, line {number}: {len(words)} numbers", allowed)
    found = torch.tensor(rows, dtype=torch.float64)
    if not rows or not found.isfinite().all():
        raise InvalidValue.of("--x", str(path), "at least one row, of finite numbers")
    return found


PRINTED = {
    "not scaled": [[1.9366, 6.6831, 1.5951], [2.0000, 7.9640, 0.0540], [1.9997, 7.7599, 0.3584]],
    "scaled by 1/√3": [[1.8639, 6.3194, 1.7042], [1.9991, 7.8141, 0.2735], [1.9926, 7.4796, 0.7359]],
    "scaled, causal": [[1.0, 2.0, 3.0], [1.9990, 7.9941, 0.0029], [1.9926, 7.4796, 0.7359]],
}
"""The outputs of the three tokens as courses print them."""


def three_tokens(settings: Settings) -> Result:  # noqa: ARG001 -- nothing is drawn
    """CL-45: the worked example of three tokens, computed by the layers `dot` and `mha`."""
    from attn_core import installed

    rows, statements = [], {}
    for (name, printed), (mechanism, causal) in zip(
        PRINTED.items(), (("dot", False), ("mha", False), ("mha", True)), strict=True
    ):
        example = worked(installed().mechanisms.get(mechanism), {}, causal=causal)
        found = example.expected[:, :3]
        difference = float((found - torch.tensor(printed, dtype=torch.float64)).abs().max())
        statements[f"the outputs {name} are those printed (to {difference:.0e})"] = difference < 1e-4
        rows += [
            {"attention": name, "token": token} | {f"out {place}": f"{value:.4f}" for place, value in enumerate(row)}
            for token, row in enumerate(found.tolist(), 1)
        ]
    verdict, because = judged(all_of=statements)
    return Result(rows=rows, verdict=verdict, because=because)


def hi_how_are_you(settings: Settings) -> Result:  # noqa: ARG001 -- nothing is drawn
    """CL-46: the softmax of the scores of "Hi how are you", as they are and divided by √64."""
    words, energies = ("Hi", "how", "are", "you"), torch.tensor([98.0, 27.0, 10.0, 12.0], dtype=torch.float64)
    plain, scaled = energies.softmax(-1), (energies / 8).softmax(-1)
    rows = [
        {"word": word, "score": f"{e:.0f}", "weight": f"{p:.5f}", "divided by √64": f"{s:.5f}"}
        for word, e, p, s in zip(words, energies.tolist(), plain.tolist(), scaled.tolist(), strict=True)
    ]
    verdict, because = judged(
        all_of={
            f"weights of the scores are spread: the largest is below 0.9 ({plain.max():.5f})": bool(plain.max() < 0.9),
            f"weights of the scores divided by √64 are ({scaled.max():.5f})": bool(scaled.max() < 0.9),
        }
    )
    return Result(rows=rows, verdict=verdict, because=because)
