"""Layouts of checkpoints by the `model_type` of a config.json: attn's, and those of plugins (hook `attn_adapters`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import Distribution, version
from importlib.util import find_spec
from typing import Any, TypeVar

from attn_core import installed
from attn_core.errors import Incompatible, UnknownName

from attn_models.adapters.bart import (
    BartAdapter,
    BlenderbotAdapter,
    M2m100Adapter,
    MarianAdapter,
    MbartAdapter,
    PegasusAdapter,
    PlbartAdapter,
)
from attn_models.adapters.base import EncoderAdapter, Layout, StateDictAdapter
from attn_models.adapters.bert import (
    BertAdapter,
    BigBirdAdapter,
    CamembertAdapter,
    LongformerAdapter,
    RobertaAdapter,
    XlmRobertaAdapter,
)
from attn_models.adapters.bert_relatives import (
    AlbertAdapter,
    ElectraAdapter,
    GteAdapter,
    JinaV3Adapter,
    MpnetAdapter,
    NomicBertAdapter,
)
from attn_models.adapters.clip import ClipAdapter
from attn_models.adapters.deberta import DebertaV2Adapter
from attn_models.adapters.deepseek import DeepseekV2Adapter, DeepseekV3Adapter
from attn_models.adapters.distilbert import DistilBertAdapter
from attn_models.adapters.families import FAMILIES
from attn_models.adapters.gpt2 import Gpt2Adapter
from attn_models.adapters.image_towers import Dinov2Layout, SiglipAdapter
from attn_models.adapters.llama import LlamaAdapter, MistralAdapter, MixtralAdapter
from attn_models.adapters.modernbert import ModernBertAdapter
from attn_models.adapters.native import LAYOUTS, NativeAdapter, NativeEncoderAdapter, NativeVitAdapter
from attn_models.adapters.qwen3_next import Qwen3NextAdapter
from attn_models.adapters.reformer import ReformerAdapter
from attn_models.adapters.smolvlm import Idefics3Adapter, SmolVlmAdapter
from attn_models.adapters.t5 import Mt5Adapter, T5Adapter, Umt5Adapter
from attn_models.adapters.vit import VitAdapter
from attn_models.adapters.whisper import WhisperAdapter
from attn_models.encoder.config import ReformerConfig, VisionConfig
from attn_models.encoder_decoder.config import EncoderDecoderConfig

ADAPTERS: dict[str, StateDictAdapter] = {
    adapter.model_type: adapter
    for adapter in (
        NativeAdapter(),
        LlamaAdapter(),
        MistralAdapter(),
        MixtralAdapter(),
        Gpt2Adapter(),
        Qwen3NextAdapter(),
        DeepseekV2Adapter(),
        DeepseekV3Adapter(),
        *FAMILIES,
        T5Adapter(),
        Mt5Adapter(),
        Umt5Adapter(),
        WhisperAdapter(),
        BartAdapter(),
        MbartAdapter(),
        PlbartAdapter(),
        PegasusAdapter(),
        BlenderbotAdapter(),
        MarianAdapter(),
        M2m100Adapter(),
        SmolVlmAdapter(),
        Idefics3Adapter(),
    )
}


OURS = "attn-models"
Kind = TypeVar("Kind", bound=Layout)


def our_adapters() -> list[Layout]:
    """The layouts of this package, which it registers like a plugin."""
    return [*ADAPTERS.values(), *ENCODER_ADAPTERS.values(), *VIT_ADAPTERS.values(), Dinov2Layout()]


def installed_adapters(kind: type[Kind]) -> dict[str, Kind]:
    """All layouts of a kind by their `model_type`, from this package and from plugins."""
    return {adapter.model_type: adapter for adapter in installed().adapters if isinstance(adapter, kind)}


def _adapter(kind: type[Kind], what: str, model_type: object, requires: object = None) -> Kind:
    known = installed_adapters(kind)
    if not isinstance(model_type, str) or model_type not in known:
        raise unknown_family(what, model_type, known, requires)
    found: Kind = installed().adapters.get(model_type)
    return found


def decoder_adapter(model_type: object, requires: object = None) -> StateDictAdapter:
    """The adapter of this `model_type`.

    Raises `UnknownName` with the known types, or with the packages of `requires`, the entry of a saved folder's
    config.json, that are not installed.
    """
    return _adapter(StateDictAdapter, "model_type of a config.json", model_type, requires)  # type: ignore[type-abstract]


def packages_of(adapter: Layout) -> dict[str, dict[str, str]]:
    """The entry `requires` of a config.json in a plugin's layout: the packages that read it, by version.

    Empty for the layouts of attn-models.
    """
    owner = installed().adapters.name_of(adapter).rpartition("/")[0]
    return {} if owner in ("", OURS) else {"requires": {name: version(name) for name in sorted({owner, OURS})}}


PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def missing_packages(requires: object) -> dict[str, str]:
    """The packages of the entry `requires` of a config.json that are not installed, with their versions.

    Entries that are not valid package names and versions are left out: they are shown to the user as part of a command.
    """
    given = requires if isinstance(requires, Mapping) else {}
    packages = {
        name: found
        for name, found in given.items()
        if isinstance(found, str) and PACKAGE.fullmatch(name) and PACKAGE.fullmatch(found)
    }
    return {name: found for name, found in packages.items() if not list(Distribution.discover(name=name))}


def through_transformers(config: Mapping[str, Any]) -> bool:
    """Whether a config.json has no layout here, but is of a causal class that the installed transformers builds.

    A family with an encoder is, where its config makes it a decoder alone, as its layout here does not.
    """
    kind, layouts = config.get("model_type"), installed_adapters(Layout)  # type: ignore[type-abstract]
    if not isinstance(kind, str) or kind in LAYOUTS:
        return False
    own = layouts.get(kind)
    encodes = isinstance(own, EncoderAdapter) or issubclass(getattr(own, "Config", object), EncoderDecoderConfig)
    decoder = encodes and config.get("is_decoder") is True and config.get("is_encoder_decoder") is not True
    if (kind in layouts and not decoder) or missing_packages(config.get("requires")):
        return False
    return find_spec("transformers") is not None and causal_class(config) is not None


def causal_class(config: Mapping[str, Any]) -> str | None:
    """The name of transformers' class of causal language models for a config.json, None if it has none.

    Of one's own `model_type`, or named in `architectures`, as by the text part of a larger model. A model of images and
    text is one too, of text alone.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    seeing, classes = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind, named = config.get("model_type"), config.get("architectures")
    known = set(named if isinstance(named, list) else ()) & {*seeing.values(), *classes.values()}
    if kind not in CONFIG_MAPPING:
        return None
    return known.pop() if len(known) == 1 else (seeing | classes).get(str(kind))


def unknown_family(kind: str, model_type: object, known: Iterable[str], requires: object = None) -> UnknownName:
    """The error for a `model_type` without a layout: the packages of `requires` that are not installed, or names of
    which it may be a misspelling, and what to do."""
    names = sorted(known)
    missing = missing_packages(requires)
    if missing:
        made = " and ".join(f"{name} {found}" for name, found in missing.items())
        message = f"unknown {kind} {str(model_type)!r}: the model was made with {made}; pip install {' '.join(missing)}"
        return UnknownName(message, kind=kind, name=str(model_type), package=", ".join(missing))
    near = get_close_matches(str(model_type), names)
    alike = f"; names like it: {', '.join(near)}" if near else ""
    through = "" if find_spec("transformers") else ", and causal ones that transformers knows: pip install transformers"
    many = f"{len(names)} families have layouts here (see packages/attn-models/README.md)"
    few = f"known: {', '.join(names)}"
    further = f"{few if len(names) <= MOST_NAMES else many}{through}; {ADVICE}"
    message = f"unknown {kind} {str(model_type)!r}{alike}; {further}"
    return UnknownName(message, kind=kind, name=str(model_type), near=", ".join(near))


ADVICE = "docs/model-families.md shows how to add a layout"
MOST_NAMES = 12
"""Of so many families all are named."""


ENCODER_ADAPTERS: dict[str, EncoderAdapter] = {
    adapter.model_type: adapter
    for adapter in (
        NativeEncoderAdapter(),
        BertAdapter(),
        RobertaAdapter(),
        XlmRobertaAdapter(),
        CamembertAdapter(),
        DistilBertAdapter(),
        ElectraAdapter(),
        AlbertAdapter(),
        MpnetAdapter(),
        NomicBertAdapter(),
        GteAdapter(),
        JinaV3Adapter(),
        DebertaV2Adapter(),
        SiglipAdapter(),
        ModernBertAdapter(),
        LongformerAdapter(),
        BigBirdAdapter(),
        ReformerAdapter(),
        ClipAdapter(),
    )
}


def encoder_adapter(model_type: object, requires: object = None) -> EncoderAdapter:
    """The adapter of this `model_type`; raises as `decoder_adapter`."""
    return _adapter(EncoderAdapter, "model_type of an encoder", model_type, requires)  # type: ignore[type-abstract]


def encoder_adapter_for(config: Any) -> EncoderAdapter:
    """The layout to save an encoder with a head: a Reformer's own, else BERT's if it suffices, else attn's.

    Raises `Incompatible` for a Reformer that its layout cannot express.
    """
    if isinstance(config, ReformerConfig):
        ENCODER_ADAPTERS[ReformerAdapter.model_type].to_hf_config(config)
        return ENCODER_ADAPTERS[ReformerAdapter.model_type]
    try:
        ENCODER_ADAPTERS[BertAdapter.model_type].to_hf_config(config)
    except Incompatible:
        return ENCODER_ADAPTERS[NativeEncoderAdapter.model_type]
    return ENCODER_ADAPTERS[BertAdapter.model_type]


VIT_ADAPTERS: dict[str, VitAdapter] = {layout.model_type: layout for layout in (VitAdapter(), NativeVitAdapter())}


def vit_adapter(model_type: object, requires: object = None) -> VitAdapter:
    """The layout of this `model_type`; raises as `decoder_adapter`."""
    return _adapter(VitAdapter, "model_type of an image model", model_type, requires)


def vit_adapter_for(config: VisionConfig) -> VitAdapter:
    """transformers' layout where it can express the model, else attn's."""
    try:
        VIT_ADAPTERS[VitAdapter.model_type].to_hf_config(config, ())
    except Incompatible:
        return VIT_ADAPTERS[NativeVitAdapter.model_type]
    return VIT_ADAPTERS[VitAdapter.model_type]


def require_known_family(model_type: object, requires: object = None) -> Layout | None:
    """The layout of this `model_type`; None for a model of an installed family, and for one that transformers builds.

    Raises as `decoder_adapter`."""
    if isinstance(model_type, str) and model_type in LAYOUTS:
        return None
    if through_transformers({"model_type": model_type, "requires": requires}):
        return None
    known = {**installed_adapters(Layout), **LAYOUTS}  # type: ignore[type-abstract]
    if not isinstance(model_type, str) or model_type not in known:
        raise unknown_family("model_type of a config.json", model_type, known, requires)
    found: Layout = installed().adapters.get(model_type)
    return found
