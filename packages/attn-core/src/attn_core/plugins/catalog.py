"""The catalogue of everything that installed plugins offer, by name."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, partial
from typing import Any

import pluggy

from attn_core.config import MechanismConfig
from attn_core.errors import MissingPackage
from attn_core.inner import InnerAttention
from attn_core.kernels.base import Kernel
from attn_core.kernels.block import BlockKernel
from attn_core.kernels.dispatch import Operation
from attn_core.kernels.linear import LinearKernel
from attn_core.mechanism import Mechanism
from attn_core.models import ModelFamily, ModelShape
from attn_core.plugins.hooks import Command, Reward
from attn_core.plugins.loader import PluginRecord, PluginStatus, changed_since, load_plugins, new_manager
from attn_core.plugins.registry import Registry
from attn_core.spec import AttentionSpec
from attn_core.stores import CacheFamily

LAYOUTS = "attn-models"
"""The distribution whose layouts no other plugin can replace, so that a known `model_type` always means the same."""

BUILT_IN = frozenset(
    f"attn-{name}"
    for name in (
        *("cache", "cli", "client", "engine", "experiments", "gateway", "kernels-cpu", "kernels-triton", "models"),
        *("openai", "serve", "train", "variants"),
    )
)
"""The distributions of this project whose names stay their own, whatever other plugins call their items."""

log = logging.getLogger(__name__)


class Catalog:
    """What the plugins offer; each kind of item is collected when it is first needed.

    A hook that raises marks its plugin as broken; the items of other plugins are kept.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._manager = new_manager()
        records = load_plugins(self._manager, environ)
        self._records = {f"{record.distribution}:{record.name}": record for record in records}

    @cached_property
    def mechanisms(self) -> Registry[Mechanism]:
        """Attention mechanisms."""
        return self._filled("mechanism", "attn_mechanisms")

    @cached_property
    def kernels(self) -> Registry[Kernel[Any]]:
        """Kernels."""
        return self._filled("kernel", "attn_kernels")

    @cached_property
    def linears(self) -> Registry[LinearKernel]:
        """Kernels of linear layers."""
        return self._filled("linear kernel", "attn_linears")

    @cached_property
    def blocks(self) -> Registry[BlockKernel]:
        """Kernels of whole decoder blocks."""
        return self._filled("block kernel", "attn_blocks")

    @cached_property
    def caches(self) -> Registry[CacheFamily]:
        """Cache families, which create state stores."""
        return self._filled("cache", "attn_caches")

    @cached_property
    def models(self) -> Registry[ModelFamily]:
        """Model families."""
        return self._filled("model family", "attn_models")

    @cached_property
    def adapters(self) -> Registry[Any]:
        """Layouts of checkpoints by the `model_type` of their config.json."""
        return self._filled("model_type", "attn_adapters", LAYOUTS)

    @cached_property
    def gguf_architectures(self) -> Registry[Any]:
        """Layouts of GGUF files by their `general.architecture`."""
        return self._filled("GGUF architecture", "attn_gguf_architectures", LAYOUTS)

    @cached_property
    def shapes(self) -> Registry[ModelShape]:
        """Published sizes of well-known models."""
        return self._filled("model shape", "attn_shapes")

    @cached_property
    def commands(self) -> Registry[Command]:
        """Subcommands of `attn`."""
        return self._filled("command", "attn_commands")

    @cached_property
    def rewards(self) -> Registry[Reward]:
        """Rewards of completions."""
        return self._filled("reward", "attn_rewards")

    @property
    def plugins(self) -> list[PluginRecord]:
        """Every plugin found, loaded or not, sorted; items are collected first, since that may mark one as broken."""
        computed = (self.mechanisms, self.kernels, self.linears, self.blocks)
        for offered in (*computed, self.caches, self.models, self.adapters, self.shapes, self.commands, self.rewards):
            len(offered)
        return [self._records[key] for key in sorted(self._records)]

    def offers(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Each thing that plugins return from `hook`, with the distribution that offers it."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        for implementation in caller.get_hookimpls():
            key = implementation.plugin_name
            try:
                chosen = {name: arguments[name] for name in implementation.argnames}
                offered: list[Any] = list(implementation.function(**chosen))  # type: ignore[call-overload]
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  # a plugin may raise anything, SystemExit too
                self._mark_broken(key, hook, error)
                continue
            yield from ((key.partition(":")[0], item) for item in offered)

    def spec_layer(self, spec: AttentionSpec, config: MechanismConfig, inner: InnerAttention | None = None) -> Any:
        """The layer that computes `spec` around `inner`, from the first plugin that offers one."""
        for _, build in self.offers("attn_spec_layers"):
            return build(spec, config, inner)
        raise MissingPackage.of("attn-variants", "computing a declared mechanism")

    def _filled(self, kind: str, hook: str, guarded: str | None = None) -> Registry[Any]:
        """The items that all plugins return from `hook`; only the distribution `guarded` can register its names."""
        same = partial(installed_registry, hook.removeprefix("attn_"))
        registry: Registry[Any] = Registry(kind, lambda: changed_since(self._records.values()), guarded, same, BUILT_IN)
        for owner, item in sorted(self.offers(hook), key=lambda offer: offer[0] != guarded):
            try:
                registry.register(item, owner)
            except Exception as error:  # noqa: BLE001  # a plugin may raise anything
                for key in [key for key in self._records if key.partition(":")[0] == owner]:
                    self._mark_broken(key, hook, error)
        for full, built_in in registry.overruled.items():
            self._tell(full, f"its {kind} {full.rpartition('/')[2]!r} has the name of {built_in}: call it {full!r}")
        return registry

    def _tell(self, full: str, remark: str) -> None:
        """Add a remark to the records of the distribution of an item, and log it."""
        owner = full.rpartition("/")[0]
        log.warning("plugin %s: %s", owner, remark)
        for key, record in self._records.items():
            if record.distribution == owner:
                reason = f"{record.reason}; {remark}" if record.reason else remark
                self._records[key] = dataclasses.replace(record, reason=reason)

    def _mark_broken(self, key: str, hook: str, error: BaseException) -> None:
        reason = f"{hook}: {type(error).__name__}: {error}"
        self._records[key] = dataclasses.replace(self._records[key], status=PluginStatus.BROKEN, reason=reason)


@cache
def installed() -> Catalog:
    """The catalogue of this process, loaded on first use."""
    return Catalog()


@cache
def installed_operation(kernel_class: Any) -> Operation[Any] | None:
    """The operation of all installed kernels of this class; None where none of them can run on this machine."""
    found: Operation[Any] = Operation(installed().kernels, kernel_class)
    return found if found.able else None


def installed_registry(name: str) -> Registry[Any]:
    """The registry of this name, such as "kernels", in the catalogue of this process."""
    registry: Registry[Any] = getattr(installed(), name)
    return registry
