"""Errors that a user can act on: what was wrong, what was given, what is allowed."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

log = logging.getLogger(__name__)


def near_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names closest to `name`, best first."""
    return difflib.get_close_matches(name, sorted(known), n=most, cutoff=0.4)


class AttnError(Exception):
    """Base class of every error this project raises on purpose.

    `reason` is a stable upper-case word for programs (`google.rpc.ErrorInfo.reason` on the wire);
    `metadata` holds the facts of the message as strings.
    """

    reason: ClassVar[str] = "ATTN_ERROR"

    def __init__(self, message: str, **metadata: Any) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.metadata)


def _rebuild(kind: type[AttnError], message: str, metadata: dict[str, str]) -> AttnError:
    error = kind.__new__(kind)
    AttnError.__init__(error, message, **metadata)
    return error


class UserError(AttnError, ValueError):
    """The caller gave something that cannot be used."""

    reason = "INVALID_ARGUMENT"


class InvalidValue(UserError):
    """One field holds a value that is not allowed."""

    reason = "INVALID_VALUE"

    @classmethod
    def of(cls, field: str, given: object, allowed: str) -> Self:
        """The error for `field`, naming what was given and what is allowed."""
        return cls(f"{field}: {given!r} is not allowed; allowed: {allowed}", field=field, given=given, allowed=allowed)

    def in_mechanism(self, name: str) -> InvalidValue:
        """The same error with the name of the mechanism that the field belongs to, if its message does not have it."""
        if f"mechanism {name!r}" in self.message:
            return self
        return InvalidValue(f"mechanism {name!r}: {self.message}", **self.metadata | {"mechanism": name})


class UnknownName(UserError):
    """A mechanism, model, kernel or option of this name does not exist."""

    reason = "UNKNOWN_NAME"

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str], meant: Sequence[str] = ()) -> Self:
        """The error for a `kind` called `name`, which suggests `meant`, or else the nearest of the `known` names."""
        names = sorted(known)
        near = meant or near_names(name, names)
        if near:
            hint = f"did you mean {' or '.join(repr(n) for n in near)}?"
        else:
            hint = f"known: {', '.join(names)}" if names else f"no {kind} is installed"
        return cls(f"unknown {kind} {name!r}; {hint}", kind=kind, name=name, near=", ".join(near))


class AmbiguousName(UserError):
    """Several distributions own this name; the full `distribution/name` is needed."""

    reason = "AMBIGUOUS_NAME"

    @classmethod
    def of(cls, kind: str, name: str, full_names: Iterable[str]) -> Self:
        """The error for a short name with several owners, each given in full."""
        owners = sorted(full_names)
        message = f"several packages provide the {kind} {name!r}; use one of: {', '.join(owners)}"
        return cls(message, kind=kind, name=name)


class Incompatible(UserError):
    """Two things that exist do not go together, such as a mechanism and a model."""

    reason = "INCOMPATIBLE"


class Undeclared(InvalidValue, Incompatible):
    """A field of the config needs a capability that the mechanism does not declare."""

    reason = "UNDECLARED"


class MechanismInvalid(UserError):
    """A mechanism contradicts itself: its declaration does not match its layer or its `state`."""

    reason = "MECHANISM_INVALID"

    @classmethod
    def of(cls, mechanism: str, what: str, remedy: str) -> Self:
        """The error for the mechanism of this name: what contradicts the declaration, and what its author can do."""
        return cls(f"mechanism {mechanism!r} {what}; {remedy}", mechanism=mechanism)


class KernelRefused(Incompatible):
    """The kernel that was selected by name, or every installed kernel, does not accept the problem."""

    reason = "KERNEL_REFUSED"


class ContextLengthExceeded(UserError):
    """The prompt and the requested new tokens together do not fit into the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"

    @classmethod
    def of(cls, prompt: int, new: int, context: int) -> Self:
        """The error with its three numbers, all in tokens."""
        message = f"prompt of {prompt} tokens + {new} new tokens exceed the context of {context} tokens"
        return cls(message, prompt_tokens=prompt, max_new_tokens=new, max_seq_len=context)


class AlreadyExists(UserError):
    """The name is already in use."""

    reason = "ALREADY_EXISTS"


class WrongState(UserError):
    """The object exists, but the operation is not possible in its present state."""

    reason = "WRONG_STATE"


class Unauthenticated(UserError):
    """The caller gave no token, or a wrong one."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(UserError):
    """The caller is authenticated, but may not do this."""

    reason = "PERMISSION_DENIED"


class CheckpointInvalid(UserError):
    """A checkpoint is truncated, hostile, of a forbidden format, or does not fit the model."""

    reason = "CHECKPOINT_INVALID"

    @classmethod
    def of(cls, path: object, rule: str) -> Self:
        """The error for the file at `path`, with the rule that it breaks."""
        return cls(f"{path}: {rule}", path=path, rule=rule)


class StateInvalid(UserError):
    """An exported state of a request is damaged, of another version, or does not fit the store."""

    reason = "STATE_INVALID"

    @classmethod
    def of(cls, what: str, given: object, needed: object) -> Self:
        """The error for the part `what` of the bytes, with the value that it has and the one that it needs."""
        message = f"exported state: {what}: {given}; expected: {needed}"
        return cls(message, what=what, given=given, needed=needed)


class CheckpointWriteFailed(AttnError):
    """A checkpoint could not be written; what was there before is intact."""

    reason = "CHECKPOINT_WRITE_FAILED"

    @classmethod
    def of(cls, path: object, why: object) -> Self:
        """The error for the checkpoint at `path`, with the reason that the file system or the writer gave."""
        return cls(f"{path}: cannot be written, existing files are unchanged: {why}", path=path, why=why)


class NotGraphSafe(AttnError):
    """A step cannot be recorded once and replayed (CUDA graph): the host needs values that change with each step."""

    reason = "NOT_GRAPH_SAFE"


def how_to_install(package: str) -> str:
    """The command that installs a package; those of attn itself are on no index: they are built into a folder."""
    if package.startswith("attn-") and "[" not in package:
        return f"pip install --find-links dist {package} (nox -s wheels builds dist)"
    return f"pip install {package!r}" if "[" in package else f"pip install {package}"


class MissingPackage(AttnError):
    """The operation needs an optional package that is not installed."""

    reason = "MISSING_PACKAGE"

    @classmethod
    def of(cls, package: str, purpose: str) -> Self:
        """The error that says how to install what `purpose` needs."""
        return cls(f"{purpose} needs {package}: {how_to_install(package)}", package=package)


class OutOfCapacity(AttnError):
    """There is no free capacity now; the same call can succeed later."""

    reason = "OUT_OF_CAPACITY"


class Unavailable(AttnError):
    """The service or model is not ready or is going away."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(AttnError):
    """The time the caller allowed is over."""

    reason = "DEADLINE_EXCEEDED"


class InternalError(AttnError):
    """A bug in attn; the details are in the server's log under the request id."""

    reason = "INTERNAL"


class LayerFailed(InternalError):
    """A layer of a model raised an error, or returned a wrong shape or numbers that are not finite."""

    reason = "LAYER_FAILED"

    @classmethod
    def of(cls, layer: str, mechanism: str | None, what: str) -> Self:
        """The error for the part of the model called `layer`, its mechanism, if any, and what went wrong."""
        named = layer if mechanism is None else f"{layer} (mechanism {mechanism!r})"
        return cls(f"layer {named} failed: {what}", layer=layer, mechanism=mechanism or "", what=what)


@contextmanager
def cleaning_up(what: str) -> Iterator[None]:
    """Log an error of the block, which cleans up `what`, instead of raising it.

    Otherwise it would replace the error that led there, and what is cleaned up next would stay.
    """
    try:
        yield
    except Exception:
        log.exception("cleaning up failed: %s", what)


@contextmanager
def starting(what: str) -> Iterator[None]:
    """Raise `Unavailable`, with the system's reason, if the block, which starts the process of `what`, cannot."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"the process of {what} could not be started: {error}") from error


def error_of_reasons(reasons: Iterable[str], message: str, metadata: dict[str, str]) -> AttnError:
    """Rebuild an error of another process: of the class of the first reason known here, else `InternalError`."""
    known: dict[str, type[AttnError]] = {}
    for kind in _with_subclasses(AttnError):
        known.setdefault(kind.reason, kind)  # a subclass without a reason of its own does not replace its base class
    found = next((known[reason] for reason in reasons if reason in known), InternalError)
    return _rebuild(found, message, metadata)


def _with_subclasses(kind: type[AttnError]) -> list[type[AttnError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in _with_subclasses(below))]
