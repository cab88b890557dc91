"""The parallel layout of a job: the sizes of its device mesh, validated before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.errors import Incompatible, InvalidValue
from attn_core.reinforce import samples_keys
from attn_models.tensor_parallel import require_model_split, split_sites
from attn_schema.model import DECODER
from attn_schema.training import TrainingConfig
from torch import nn

from attn_train.precision import blocks_of


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """Sizes of the device mesh, with torchtitan's names: replicas of the model (`dp_replicate`), workers that shard its
    blocks (`dp_shard`), split its heads (`tp`), and split the tokens of its sequences (`cp`)."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.dp * self.tp * self.cp

    @property
    def dp(self) -> int:
        """The degree of data parallelism: the number of parts into which the sequences of a batch are split."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def of(cls, config: TrainingConfig) -> MeshLayout:
        """Return the layout of a job."""
        inner = config.dp_shard * config.tp * config.cp
        return cls(dp_replicate=config.workers // inner, dp_shard=config.dp_shard, tp=config.tp, cp=config.cp)


def check_layout(model: nn.Module, config: TrainingConfig) -> None:
    """Raise an error for the first problem that keeps workers from training a model, which may be on the meta device:
    `InvalidValue` for sizes that do not divide, `Incompatible`, with its name, for what does not support the layout."""
    layout = MeshLayout.of(config)
    if layout.workers == 1:
        return
    _check_batch(config, layout)
    if samples_keys(model):
        raise Incompatible("layers that sample keys can only be trained by 1 worker", field="config.workers")
    if config.data.format == "preference" or config.objective.teacher is not None:
        message = "training with preferences or a teacher is only supported with 1 worker"
        raise Incompatible(message, field="config.workers")
    if config.data.format == "prompt" and config.on_policy.loss_type == "bnpo":
        message = "the loss bnpo is a mean over all tokens of a batch: several workers need grpo, dr_grpo or dapo"
        raise Incompatible(message, field="config.on_policy.loss_type")
    whole = layout.tp == layout.dp_shard == layout.cp == 1
    if config.model.base_model is not None and not whole:
        message = "training from a base model is not sharded or split: dp_shard, tp and cp must be 1"
        raise Incompatible(message, field="config.model.base_model")
    whole_weights = {"muon": "whole matrices", "adamw_8bit": "whole weights, whose blocks have scales"}
    if (needed := whole_weights.get(config.optimizer.optim)) and not (layout.tp == layout.dp_shard == 1):
        message = f"{config.optimizer.optim} needs {needed}: dp_shard and tp must be 1"
        raise Incompatible(message, field="config.optimizer.optim")
    if layout.tp > 1:
        _named(lambda: require_model_split(model, layout.tp), "config.tp")
    if layout.dp_shard > 1 and not blocks_of(model):
        raise Incompatible(
            f"a {type(model).__name__} has no blocks to shard: dp_shard must be 1", field="config.dp_shard"
        )
    if layout.cp > 1:
        _named(lambda: _check_context(model, config), "config.cp")


def _check_batch(config: TrainingConfig, layout: MeshLayout) -> None:
    parts, batch = layout.dp, config.optimizer.batch_size
    if batch % parts:
        allowed = f"a multiple of {parts}, the number of data-parallel workers"
        raise InvalidValue.of("config.optimizer.batch_size", batch, allowed)


def _check_context(model: Any, config: TrainingConfig) -> None:
    if config.data.packs_documents:
        raise Incompatible("document_mask needs workers with whole sequences: cp must be 1")
    ahead: int = getattr(model.config, "num_nextn_predict_layers", 0)
    if config.model.family != DECODER or ahead:
        raise Incompatible(
            "only decoders without multi-token prediction can be split by tokens: for others, cp must be 1"
        )
    layer: Any
    for layer in split_sites(model).values():
        name = getattr(getattr(layer, "mechanism", None), "name", None)
        if name is None:
            continue
        if not layer.splits_tokens:
            raise Incompatible(f"mechanism {name!r} cannot be split by tokens: cp must be 1", mechanism=name)
        try:
            layer.require_token_split(config.model.sequence_length, config.cp)
        except Incompatible as error:
            message = f"mechanism {name!r} cannot be split by tokens: {error.message}"
            raise Incompatible(message, mechanism=name) from error


def _named(check: Any, field: str) -> None:
    """Run a check; its errors get the name of the configuration field that caused them."""
    try:
        check()
    except (Incompatible, InvalidValue) as error:
        error.metadata["field"] = field
        raise
