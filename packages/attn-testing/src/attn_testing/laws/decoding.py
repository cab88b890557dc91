"""Laws of serving: steps, chunks, batches and trees equal the full forward pass; states have their declared sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attn_core import state_bytes
from torch import Tensor

from attn_testing.law import MechanismLaw, require, require_same
from attn_testing.memory import DictionaryStore
from attn_testing.serving import LAYER, Serving
from attn_testing.subject import Case

TOKENS = 12


def silent_where_nothing_decodes(case: Case) -> str | None:
    """Why a layer cannot run step by step, if it attends to later inputs; None if it can."""
    return None if case.cross or case.causal else "it is not causal, so it cannot decode"


class DecodeEqualsForward(MechanismLaw):
    """Decoding by `step`, or by replay if there is none, gives the outputs of the full forward pass."""

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case)

    def test_every_token_decoded_alone_equals_its_row_of_the_full_forward(self, case: Case) -> None:
        run(case, TOKENS, prompt=1)

    def test_a_prompt_and_then_many_single_tokens_equal_the_full_forward(self, case: Case) -> None:
        run(case, case.tokens, prompt=5)


def run(case: Case, tokens: int, prompt: int) -> None:
    """Feed `prompt` tokens, then one at a time, and compare with the full forward pass."""
    rows, source = case.rows(tokens), case.source(5)
    with torch.no_grad():
        full = case.attend(rows[None], None if source is None else source[None])[0]
    serving = Serving(case)
    serving.open(0, source)
    first = serving.step({0: rows[:prompt]})[0]
    require_same(
        first, full[:prompt], f"outputs of a first step of {prompt} tokens and of the full forward pass", case.tolerance
    )
    for position in range(prompt, tokens):
        out = serving.step({0: rows[position : position + 1]})[0]
        what = f"outputs of token {position} decoded alone and in the full forward pass"
        require_same(out[0], full[position], what, case.tolerance)


SPLITS = ((1, 4, 2, 5), (6, 6), (3, 1, 1, 7))


class ChunkedPrefill(MechanismLaw):
    """A prompt fed in chunks gives the outputs of one prefill, and the same outputs for the tokens after it."""

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case)

    def test_chunks_equal_one_prefill(self, case: Case) -> None:
        same_in_chunks(case, TOKENS, SPLITS)

    def test_long_chunks_equal_one_prefill(self, case: Case) -> None:
        same_in_chunks(case, case.tokens, ((19, 1, case.tokens - 20),))


def same_in_chunks(case: Case, tokens: int, splits: Sequence[tuple[int, ...]]) -> None:
    """Raise `LawBroken` unless a prompt of `tokens` tokens has the same outputs in each of these splits as at once."""
    rows, source = case.rows(tokens + 1), case.source(5)
    whole = feed(case, (tokens, 1), rows, source)
    for split in splits:
        chunks = feed(case, (*split, 1), rows, source)
        require_same(chunks, whole, f"outputs of a prompt in chunks of {split} and at once", case.tolerance)


def feed(case: Case, lengths: tuple[int, ...], rows: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    """The outputs [tokens, width] of one request fed in steps of these lengths."""
    serving, out, start = Serving(case), [], 0
    serving.open(0, source)
    for length in lengths:
        out.append(serving.step({0: rows[start : start + length]})[0])
        start += length
    return torch.cat(out)


PLAN: tuple[Mapping[int, int], ...] = (
    {0: 3},
    {0: 1, 1: 6},
    {2: 2, 1: 1, 0: 1},
    {0: 1, 2: 4, 3: 1, 1: 1},
    {3: 5, 0: 1},
    {4: 3, 5: 11, 1: 1, 6: 2, 0: 1},
    {1: 1, 6: 1, 3: 1, 5: 1, 2: 1, 0: 1, 4: 1},
)
"""Steps as request -> number of new tokens: some requests prefill in chunks while others decode, in varying order."""

BATCH = 19
"""The number of sequences of a large batch."""


class BatchInvariance(MechanismLaw):
    """A sequence has the same outputs alone and in a batch, and a request the same outputs alone and with others."""

    def test_a_sequence_alone_equals_itself_in_a_batch(self, case: Case) -> None:
        query, source = case.rows(BATCH, 7), case.source(BATCH, 5)
        with torch.no_grad():
            together = case.attend(query, source)
            for row in (0, 1, BATCH - 1):
                alone = case.attend(query[row : row + 1], None if source is None else source[row : row + 1])
                require_same(
                    together[row], alone[0], f"outputs of sequence {row} in a batch of {BATCH} and alone", 1e-10
                )
            turned = case.attend(query.flip(0), None if source is None else source.flip(0)).flip(0)
        require_same(turned, together, "outputs of a batch in reverse order and in order", 1e-10)

    def test_a_request_alone_equals_itself_in_a_crowd(self, case: Case) -> None:
        if silent_where_nothing_decodes(case):
            return
        names = sorted({name for step in PLAN for name in step})
        rows = {name: case.rows(20, seed=10 + name) for name in names}
        sources = {name: case.source(3 + name, seed=30 + name) for name in names}
        crowd = follow(case, PLAN, rows, sources)
        for name in names:
            own = tuple({name: step[name]} for step in PLAN if name in step)
            alone = follow(case, own, rows, sources)[name]
            require_same(
                crowd[name],
                alone,
                f"outputs of request {name} in steps with {len(names)} requests and alone",
                case.tolerance,
            )


def follow(
    case: Case, plan: tuple[Mapping[int, int], ...], rows: Mapping[int, Tensor], sources: Mapping[int, Tensor | None]
) -> dict[int, Tensor]:
    """The outputs [tokens, width] of every request of a plan; a request is opened in its first step."""
    serving = Serving(case)
    out: dict[int, list[Tensor]] = {}
    for step in plan:
        for name in step:
            if name not in serving.done:
                serving.open(name, sources[name])
        new = {name: rows[name][serving.done[name] : serving.done[name] + length] for name, length in step.items()}
        for name, got in serving.step(new).items():
            out.setdefault(name, []).append(got)
    return {name: torch.cat(got) for name, got in out.items()}


PREFIX = 7
"""The number of tokens before the tree, which are computed as a prompt and one more token."""
PARENTS = (-1, -1, 0, 0, 1, 2, 3)
"""A tree of three levels; all tokens of one level have the same position."""
PATHS = ((0, 2, 5), (1, 4), (0, 3, 6))
"""The paths from each root to each leaf."""


class TreeEqualsPaths(MechanismLaw):
    """Tokens of a tree have the outputs that each path has alone, and so do tokens after a path that is kept.

    Miao et al. 2023, arXiv 2305.09781.
    """

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case) or DictionaryStore({LAYER: case.specs}).tree_unsupported_reason()

    def test_tokens_of_a_tree_equal_each_path_alone(self, case: Case) -> None:
        rows = case.rows(PREFIX + len(PARENTS))
        serving = begun(case, rows)
        outputs = serving.tree(0, rows[PREFIX:], PARENTS)
        for path in PATHS:
            what = f"outputs of the path {path} in the tree {PARENTS} and of that path alone"
            require_same(outputs[list(path)], alone(case, rows, path), what, case.tolerance)

    def test_what_follows_a_kept_path_follows_it_alone(self, case: Case) -> None:
        rows, path = case.rows(PREFIX + len(PARENTS) + 1), PATHS[-1]
        serving = begun(case, rows)
        serving.tree(0, rows[PREFIX:-1], PARENTS)
        serving.keep(0, path)
        after = serving.step({0: rows[-1:]})[0][0]
        expected = alone(case, rows, (*path, len(PARENTS)))[-1]
        require_same(
            after,
            expected,
            f"outputs of a token after the path {path} of a tree and after that path alone",
            case.tolerance,
        )


def begun(case: Case, rows: Tensor) -> Serving:
    """A request of which the first `PREFIX` tokens are computed."""
    serving = Serving(case)
    serving.open(0, case.source(5))
    serving.step({0: rows[: PREFIX - 1]})
    serving.step({0: rows[PREFIX - 1 : PREFIX]})
    return serving


def alone(case: Case, rows: Tensor, path: Sequence[int]) -> Tensor:
    """Outputs [tokens, width] for the inputs of a path, computed token by token."""
    serving = begun(case, rows)
    return torch.cat([serving.step({0: rows[PREFIX + node, None]})[0] for node in path])


SOURCE = 4


class StateBytes(MechanismLaw):
    """The state tensors after every step take exactly `state_bytes` bytes."""

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case)

    def test_remembered_tensors_weigh_what_the_formula_says(self, case: Case) -> None:
        serving = Serving(case)
        serving.open(0, case.source(SOURCE))
        tokens = 0
        for length in (1, 5, 1, 2, case.tokens - 9):
            serving.step({0: case.rows(length)})
            tokens += length
            declared = state_bytes(case.specs, tokens=tokens, source=SOURCE if case.cross else 0, dtype="float64")
            held = serving.store.live_bytes(0, tokens)
            require(
                held == declared, f"after {tokens} tokens the state takes {held} bytes, the specs declare {declared}"
            )
