"""No option of training is silent: each changes what is observed of a job, or is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attn_core.errors import UserError
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig, field_path
from attn_train.admission import check_config
from attn_train.checkpoint import CheckpointFolder
from attn_train.data.load import load_dataset
from attn_train.model import resolved
from attn_train.records import StopFlag
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model


def with_options(config: TrainingConfig, options: Mapping[str, Any]) -> TrainingConfig:
    plain = msgspec.to_builtins(config)
    for name, value in options.items():
        *parts, last = field_path(name).split(".")
        place = plain
        for part in parts:
            place = place[part]
        place[last] = value
    return TrainingConfig.from_mapping(plain)


VALUES: dict[str, Any] = {
    "family": "gpt3",
    "mechanism": "linear",
    "options": {"size": 3},
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 4,
    "intermediate_size": 24,
    "max_seq_len": 6,
    "max_encoder_len": 6,
    "norm": "rms",
    "norm_place": "post",
    "feed_forward": "swiglu",
    "positions": "learned",
    "dropout": 0.3,
    "attention_dropout": 0.3,
    "tie_word_embeddings": False,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "routing": "switch",
    "router_aux_loss_coef": 0.5,
    "kv_sharing": "cla:2",
    "model_options": {"norm_eps": 0.1},
    "base_model": "nobody",
    "dataset": "OTHER",
    "tokenizer": "word",
    "validation_fraction": 0.4,
    "languages": "en-de",
    "max_pairs": 5,
    "format": "chat",
    "prepared": "nowhere",
    "document_mask": False,
    "steps": 5,
    "batch_size": 3,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "linear",
    "min_learning_rate": 0.03,
    "warmup_steps": 2,
    "start_decay_steps": 1,
    "decay_steps": 1,
    "weight_decay": 0.9,
    "beta1": 0.2,
    "beta2": 0.2,
    "epsilon": 0.1,
    "momentum": 0.5,
    "rho": 0.5,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.01,
    "max_grad_norm_ratio": 3.0,
    "ema_decay": 0.9,
    "label_smoothing": 0.2,
    "lora_rank": 2,
    "lora_alpha": 2.0,
    "lora_dropout": 0.1,
    "lora_target_modules": ("q_proj",),
    "rank_pattern": ("q_proj=2",),
    "alpha_pattern": ("q_proj=2",),
    "modules_to_save": ("lm_head",),
    "trainable_token_indices": (1,),
    "use_rslora": True,
    "use_dora": True,
    "base_quantization": "int8",
    "preference_loss": "ipo",
    "preference_beta": 0.2,
    "simpo_gamma": 0.3,
    "flipped_share": 0.2,
    "desirable_weight": 2.0,
    "undesirable_weight": 2.0,
    "teacher": "nobody",
    "distillation_temperature": 2.0,
    "distillation_weight": 0.4,
    "reward_funcs": ("accuracy",),
    "reward_weights": (2.0,),
    "num_generations": 2,
    "num_iterations": 2,
    "max_completion_length": 2,
    "temperature": 0.5,
    "beta": 0.2,
    "epsilon_low": 0.1,
    "epsilon_high": 0.3,
    "loss_type": "grpo",
    "use_bias_correction_kl": False,
    "scale_rewards": "none",
    "importance_sampling_level": "sequence",
    "mask_truncated_completions": True,
    "lmbda": 0.5,
    "save_steps": 1,
    "save_total_limit": 1,
    "columns": ("prompt=question",),
    "skip_broken": True,
    "logging_steps": 2,
    "eval_steps": 2,
    "eval_batches": 1,
    "load_best_model_at_end": True,
    "early_stopping_patience": 1,
    "bleu_sentences": 3,
    "precision": "bfloat16",
    "seed": 9,
    "min_workers": 2,
    "dp_shard": 2,
    "tp": 2,
    "cp": 2,
}
"""Another value than the default for each option."""
ELSEWHERE = {
    "max_failures": "tests/jobs/test_supervisor.py: one loss more than allowed",
    "workers": "tests/parallel/test_groups.py",
    "batch_invariant": "tests/loop/test_grpo.py: log probabilities are those of the engine",
    "rollout_server": "tests/combinations/test_rewards_on_several_engines.py: the same run as in one process",
    "rollout_model": "tests/combinations/test_rewards_on_several_engines.py",
    "device": "tests/loop/test_on_gpu.py; a device that is not there is refused",
    "torch_compile": "tests/loop/test_blocks.py: the blocks are compiled",
    "gradient_checkpointing": "tests/service/test_estimates.py: activations are not held",
}
"""Options that change how a job is run and not what it finds, with the test that observes it."""


def options() -> list[str]:
    plain = msgspec.structs.asdict(TrainingConfig())
    parts = [part for part in plain.values() if isinstance(part, msgspec.Struct)]
    own = [name for name, part in plain.items() if not isinstance(part, msgspec.Struct)]
    return own + [name for part in parts for name in part.__struct_fields__]


class Seen(NullReporter):
    """Everything that a job tells."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        timed = {"tokens_per_second", "elapsed_seconds"}
        self.told.append((step, {name: value for name, value in values.items() if name not in timed}))

    def checkpoint(self, step: int, where: str, size: int) -> None:
        self.told.append(("checkpoint", step))


def observed(config: TrainingConfig, home: Path, folder: Path) -> list[Any]:
    """What a job of four steps tells, and leaves."""
    check_config(config, home=home)
    dataset = load_dataset(config, home, lambda _: None)
    seen, checkpoints = Seen(), CheckpointFolder(folder)
    trainer = Trainer(build_model(config, dataset), dataset, config, checkpoints=checkpoints)
    trainer.run(seen, StopFlag())
    whole = trainer.whole_model()
    kept = sorted(path.name for path in folder.iterdir())
    return [*seen.told, dataset.summary, kept, sum(float(p.detach().double().sum()) for p in whole.parameters())]


@pytest.fixture(scope="module", autouse=True)
def short_batches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attn_train.tasks.base.VALIDATION_TOKENS", 64)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    (home / "data" / "words.txt").write_text("query key value softmax head " * 60)
    (home / "data" / "other.txt").write_text("one two three four five six seven " * 60)
    config = TrainingConfig(
        model=ModelConfig(mechanism="mha", hidden_size=16, num_layers=2, num_heads=2, max_seq_len=8),
        data=DataConfig(dataset=str(home / "data" / "words.txt")),
        optimizer=OptimizerConfig(steps=4, batch_size=4, learning_rate=1e-2),
    )
    config = config.replace(
        evaluation=config.evaluation.replace(logging_steps=1, eval_steps=4, eval_batches=2),
        checkpoint=config.checkpoint.replace(save_steps=2),
    )
    return home, config, observed(resolved(config), home, home / "base")


def test_every_option_has_a_value_here():
    assert sorted(options()) == sorted([*VALUES, *ELSEWHERE])


@pytest.mark.parametrize("name", VALUES)
def test_an_option_changes_what_is_observed_or_is_refused_by_name(base, tmp_path, name):
    home, config, plain = base
    value = str(home / "data" / "other.txt") if VALUES[name] == "OTHER" else VALUES[name]
    try:
        changed = observed(resolved(with_options(config, {name: value})), home, tmp_path / "job")
    except UserError as error:
        told = f"{error.message} {error.metadata.get('field', '')}"
        words = [name, field_path(name), str(value), *(value if isinstance(value, dict) else ())]
        assert any(word in told for word in words), told
        return
    assert changed != plain, f"{name}={value!r} is silent"
