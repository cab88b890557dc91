"""Judges foreign implementations by the laws, and writes the verdicts as a table."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from typing import Any

import torch
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from torch import nn

from attn_testing.check import LawResult, judge
from attn_testing.foreign_families import adapted, configured, takes_config
from attn_testing.foreign_subject import CAUSAL, SIZES, Foreign, ForeignFunction, parameters
from attn_testing.laws.foreign import FOREIGN_LAWS, ForeignLaw


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The verdicts on one implementation; `package` is its distribution with the version."""

    name: str
    package: str
    label: str
    results: tuple[LawResult, ...]


@dataclass(frozen=True)
class Subject:
    """One implementation, as `judge` takes it."""

    cases: list[Foreign]


def examine(
    target: str,
    *,
    options: Mapping[str, Any] | None = None,
    causal: bool = True,
    padding: tuple[str, str] | None = None,
    linear: bool = False,
    silent: Mapping[str, str] | None = None,
    multiple: int = 1,
) -> Examined:
    """Judge the object `package:object` by every law.

    A class is built with `options`, and usual names of sizes where they are required; a function is called with them.
    `padding` is the argument of a module for padding and its form, see `PADDING`; `linear` says that the package
    promises linear cost; `silent` are laws that are not asked, with the reason;
    `multiple` is what lengths must be multiples of. Raises `UnknownName` for an object that cannot be found,
    `InvalidValue` for one that is no attention, and `Incompatible` for one that cannot run here.
    """
    case = foreign(target, found_object(target), options or {}, causal=causal, padding=padding)
    case.growth, case.multiple = 1 if linear else 2, multiple
    case.tokens = case.several(max(case.tokens, 2 * multiple))
    _ = case.dtype
    case.cast(case.dtype)
    results = tuple(smallest(law, case, (silent or {}).get(law.title())) for law in FOREIGN_LAWS)
    given = "".join(f", {name}={value}" for name, value in (options or {}).items() if name not in {*SIZES, *CAUSAL})
    return Examined(name=target, package=_package(target), label=case.label + given, results=results)


def smallest(law: type[ForeignLaw], case: Foreign, silent: str | None = None) -> LawResult:
    """Judge one law, unless `silent` says why not; where numbers break it, the result is that of the fewest tokens."""
    usual = case.tokens
    if silent is not None:
        says = (inspect.getdoc(law) or "").partition("\n")[0]
        return LawResult(law=law.title(), summary=says, passed=True, applied=False, detail=silent)
    result = judge(law, Subject([case]))
    try:
        if law.by_tokens and "LawBroken" in result.detail:
            for tokens in range(case.multiple, usual, case.multiple):
                case.tokens = tokens
                fewer = judge(law, Subject([case]))
                if "LawBroken" in fewer.detail:
                    return dataclasses.replace(fewer, detail=f"{tokens} tokens: {fewer.detail}")
    finally:
        case.tokens = usual
    return result


def foreign(
    target: str, found: Any, options: Mapping[str, Any], *, causal: bool, padding: tuple[str, str] | None = None
) -> Foreign:
    """The object as the laws call it; raises as `examine`."""
    if isinstance(found, type) and issubclass(found, nn.Module):
        torch.manual_seed(0)
        found = (
            configured(target, found, options) if takes_config(found) else _built(target, found, options, causal=causal)
        )
    if isinstance(found, nn.Module):
        with torch.no_grad():
            for weight in found.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        return adapted(target, found, causal=causal, padding=padding)
    if not callable(found) or isinstance(found, type):
        raise InvalidValue.of("object", target, "a torch.nn.Module, a class of one, or a function of q, k and v")
    return ForeignFunction(target, found, causal=causal, options=options)


def markdown(examined: Sequence[Examined]) -> str:
    """A table of the verdicts by implementation and law, and below it the case that shows each broken law."""
    laws = [law.title() for law in FOREIGN_LAWS]
    head = ["implementation", "package", "as", *(law.replace("_", " ") for law in laws)]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    broken = []
    for one in examined:
        words = {result.law: verdict(result) for result in one.results}
        lines.append(" | ".join([f"`{one.name}`", one.package, one.label, *(words[law] for law in laws)]))
        broken += [
            f"- `{one.name}` ({one.label}), {result.law.replace('_', ' ')}: {result.detail.partition(chr(10))[0]}"
            for result in one.results
            if result.applied and not result.passed
        ]
    table = "\n".join(f"| {line} |" for line in lines)
    return table + ("\n\n" + "\n".join(broken) if broken else "") + "\n"


def verdict(result: LawResult) -> str:
    """The verdict in a word: where a law is not kept, either numbers are wrong, or an error is raised instead."""
    if not result.applied:
        return "not asked"
    judged = any(f"{name}:" in result.detail for name in ("LawBroken", "GradcheckError"))
    return "kept" if result.passed else "**wrong**" if judged else "raises"


def found_object(target: str) -> Any:
    """The object `package.module:object`; raises as `examine`."""
    module, colon, path = target.partition(":")
    if not colon or not path:
        raise InvalidValue.of("object", target, "PACKAGE.MODULE:OBJECT")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise UnknownName(f"unknown object {target!r}: {error}", kind="object", name=target) from error
    return found


def _built(target: str, found: type[nn.Module], options: Mapping[str, Any], *, causal: bool) -> nn.Module:
    required = [
        name
        for name, one in inspect.signature(found).parameters.items()
        if one.default is inspect.Parameter.empty and one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    known = parameters(found)
    usual = {name: size for name, size in SIZES.items() if name in known}
    flags = {"batch_first": True, "causal": causal, "layer_idx": 0}
    first = {name: flag for name, flag in flags.items() if name in known}
    missing = [name for name in required if name not in usual and name not in options]
    if missing:
        raise InvalidValue.of("option", missing, f"values of the arguments {', '.join(missing)} of {target}")
    try:
        return found(**usual | first | dict(options))
    except Exception as error:  # whatever a stranger's constructor raises
        raise Incompatible(f"{target} cannot be built: {type(error).__name__}: {error}") from error


def _package(target: str) -> str:
    top = target.partition(":")[0].partition(".")[0]
    names = packages_distributions().get(top, [])
    return f"{names[0]} {version(names[0]).partition('+')[0]}" if names else top
