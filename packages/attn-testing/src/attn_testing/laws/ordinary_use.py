"""Laws of what people do with any torch module beside training it and serving it."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from attn_core import Capability, installed
from attn_core.errors import UserError
from attn_core.kernels.attend import AttendKernel

from attn_testing.law import LawBroken, MechanismLaw, require, require_same
from attn_testing.subject import Case


class Copied(MechanismLaw):
    """A deep copy of a layer computes the same, before and after a training pass, with parameters of its own."""

    cases_at_most = 3

    def test_a_deep_copy_computes_the_same_with_parameters_of_its_own(self, case: Case) -> None:
        layer, rows, source = case.build(), case.rows(2, case.tokens), case.source(2, case.tokens)
        for moment in ("a new layer", "a layer after a training pass"):
            try:
                other = copy.deepcopy(layer)
            except Exception as error:
                raise LawBroken(f"{moment} cannot be copied: {type(error).__name__}: {error}") from error
            shared = {id(tensor) for tensor in layer.parameters()} & {id(tensor) for tensor in other.parameters()}
            require(not shared, f"{moment} shares parameters with its copy")
            with torch.no_grad():
                copied, own = (case.attend(rows, source, None, each.eval()) for each in (other, layer))
            require_same(copied, own, f"outputs of {moment} and its copy", 1e-12)
            case.attend(rows.clone().requires_grad_(), source, None, layer.train())


TOKENS, IN_FRONT = 12, 5


class PaddingInFront(MechanismLaw):
    """Padding before a sequence changes no output, unless the mechanism says so (`depends_on_padding`)."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.PADDING,)

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return "it depends on padding" if case.mechanism.depends_on_padding(case.config) else None

    def test_padding_in_front_changes_nothing(self, case: Case) -> None:
        with torch.no_grad():
            alone, behind = alone_and_behind_padding(case)
        require_same(behind, alone, "outputs behind padding and without it", 1e-9)


def alone_and_behind_padding(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs for a sequence, and for the same sequence, or source, behind padding."""
    rows, noise = case.rows(1, TOKENS), case.rows(1, IN_FRONT, seed=4)
    real = (torch.arange(IN_FRONT + TOKENS) >= IN_FRONT)[None]
    padded = torch.cat([noise, rows], dim=1)
    if case.cross:
        query = case.rows(1, TOKENS, seed=5)
        return case.attend(query, rows), case.attend(query, padded, real)
    return case.attend(rows), case.attend(padded, None, real)[:, IN_FRONT:]


class KernelNames(MechanismLaw):
    """The name of a kernel is honoured or refused: that of no kernel, and that of a kernel which cannot run here.

    The name "plain" gives the same outputs on every layer that takes names.
    """

    cases_at_most = 2

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return (
            None
            if case.refusal is None and hasattr(case.layer, "use_kernel")
            else "its layer takes no names of kernels"
        )

    def test_a_name_that_cannot_be_honoured_is_refused(self, case: Case) -> None:
        rows, source = case.rows(1, TOKENS), case.source(1, TOKENS)
        attending = [kernel for kernel in installed().kernels if isinstance(kernel, AttendKernel)]
        elsewhere = [kernel.name for kernel in attending if "device" in kernel.accepts and needs_gpu(kernel)]
        for name in ("no_such_kernel", *elsewhere):
            layer = case.build()
            try:
                layer.use_kernel(name)
                with torch.no_grad():
                    case.attend(rows, source, None, layer)
            except UserError:
                continue
            raise LawBroken(f"the kernel {name!r} cannot compute this layer, but its name is accepted")

    def test_the_plain_kernel_computes_the_same(self, case: Case) -> None:
        rows, source, layer = case.rows(1, case.tokens), case.source(1, case.tokens), case.build()
        layer.use_kernel("plain")
        with torch.no_grad():
            require_same(case.attend(rows, source, None, layer), case.attend(rows, source), 'outputs by "plain"', 1e-9)


def needs_gpu(kernel: AttendKernel) -> bool:
    """Whether a kernel refuses the CPU, on which laws are checked."""
    return kernel.accepts["device"].refuses("cpu") is not None


class NoSequences(MechanismLaw):
    """A batch of no sequence gives no outputs and no weights, and gradients of zero."""

    cases_at_most = 2

    def test_a_batch_without_sequences_computes_nothing(self, case: Case) -> None:
        for length in (TOKENS, case.tokens):
            rows, source = case.rows(0, length), case.source(0, length)
            with torch.no_grad():
                self.require_empty(case, rows, source)
            out = self.require_empty(case, rows.requires_grad_(), source)
            torch.autograd.backward(out.sum())

    def require_empty(self, case: Case, rows: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        """The outputs, of the shape of `rows`, with and without a mask; weights have a batch of none, too."""
        real = torch.ones(0, rows.shape[1], dtype=torch.bool) if case.mechanism.can(Capability.PADDING) else None
        try:
            found: list[torch.Tensor] = [case.attend(rows, source), case.attend(rows, source, real)]
            weights = [case.weights(rows, source)] if case.mechanism.can(Capability.WEIGHTS) else []
        except Exception as error:
            raise LawBroken(f"{rows.shape[1]} tokens of no sequence: {error}") from error
        require(all(out.shape == rows.shape for out in found), f"outputs have shape {tuple(found[0].shape)}")
        require(all(len(share) == 0 for share in weights), "weights of no sequence are not empty")
        return found[0]


class OnMeta(MechanismLaw):
    """A layer runs on the meta device, which computes shapes only, as large models are planned there."""

    cases_at_most = 2

    def test_a_layer_on_the_meta_device_gives_the_shape(self, case: Case) -> None:
        layer, rows, source = case.build().to("meta"), case.rows(2, case.tokens), case.source(2, TOKENS)
        try:
            with torch.no_grad():
                out = case.attend(rows.to("meta"), None if source is None else source.to("meta"), None, layer)
        except (RuntimeError, NotImplementedError) as error:
            raise LawBroken(f"a layer on the meta device: {error}") from error
        require(out.shape == rows.shape and out.is_meta, f"outputs have shape {tuple(out.shape)} on {out.device}")
