"""The host of a generative model, a decoder or an encoder-decoder model, with its engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from attn_core.errors import AttnError, Incompatible, InvalidValue, cleaning_up
from attn_models.loading import LoadedModel
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    EngineConfig,
    EngineStats,
    ModelInfo,
    Prompt,
    SamplingParams,
    Tokenization,
)

from attn_engine.build import build_engine
from attn_engine.client import TextTask
from attn_engine.host.adapters import LoadedAdapters
from attn_engine.host.attention_maps import compute_maps
from attn_engine.host.host import Deliver, ModelHost, with_process
from attn_engine.host.image_rows import ImageRows
from attn_engine.host.loading import load_draft_model, quantization_of, recommended_sampling, use_kernel
from attn_engine.host.memory import explain_too_small, with_kv_cache_memory
from attn_engine.host.rank_processes import local_ranks
from attn_engine.host.ranks import RankGroup, load_part, rank_threads, require_tensor_parallel
from attn_engine.host.tokenization import PromptTokenizer
from attn_engine.loop import EngineLoop
from attn_engine.model_runner import numerics_of
from attn_engine.request import Request
from attn_engine.state_transfer import PromptState

OpenRanks = Callable[[Path, EngineConfig], RankGroup]
"""Starts the other ranks of a model that is split by tensor parallelism."""


class EngineHost(ModelHost):
    """Loads the model in `folder` and runs its engine on a thread.

    With a `tensor_parallel_size` above 1 this process is the first rank, and `open_ranks` starts the others; by default
    they are processes on this machine.
    """

    REFUSAL = "the model is not an encoder and cannot compute embeddings; load an encoder, such as minilm"

    def __init__(
        self, folder: Path, config: EngineConfig, deliver: Deliver, open_ranks: OpenRanks | None = None
    ) -> None:
        self._ranks: RankGroup | None = None
        if config.tensor_parallel_size > 1:
            require_tensor_parallel(folder, config)
            config = config.replace(enforce_eager=True)  # replayed steps would not be sent to the other ranks
            self._ranks = (open_ranks or local_ranks)(folder, config)
        try:
            self._open(folder, config, deliver)
        except BaseException:
            if self._ranks is not None:
                with cleaning_up("the ranks"):
                    self._ranks.stop()
            raise

    def _open(self, folder: Path, config: EngineConfig, deliver: Deliver) -> None:
        torch.set_num_threads(rank_threads(config))
        self._loaded: LoadedModel = load_part(folder, config, 0)
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        if tokenizer is None:
            raise InvalidValue.of("source", folder, "a model folder with a tokenizer.json")
        if self._ranks is not None:
            self._ranks.wait_until_ready(self._loaded.device)
        use_kernel(model, config.kernel, numerics_of(config))
        self._recommended = recommended_sampling(self._loaded)
        self._images = ImageRows.of(self._loaded)
        self._tokenizer = PromptTokenizer(
            tokenizer,
            encoder=self._loaded.max_encoder_len is not None,
            images=None if self._images is None else self._images.prompts,
        )
        draft, device = load_draft_model(self._loaded, config), self._loaded.device
        config = with_kv_cache_memory(config, model, device, drafts=draft is not None)
        leader = None if self._ranks is None else self._ranks.leader
        try:
            engine = build_engine(model, tokenizer, config, draft_model=draft, ranks=leader)
        except InvalidValue as error:
            raise explain_too_small(error, config, device) from error
        engine.warm_up()
        self._note = engine.note
        self._loop = EngineLoop(engine, deliver)
        self._adapters = LoadedAdapters(self._loaded, self._loop, config.max_loras)

    @property
    def info(self) -> ModelInfo:
        """A description of the model."""
        model, mechanisms = self._loaded.model, self._loaded.mechanisms
        parameter = next(model.parameters())
        return ModelInfo(
            architecture=self._loaded.family,
            mechanisms=tuple(dict.fromkeys(mechanisms)),
            num_parameters=self._loaded.parameters,
            max_seq_len=model.max_seq_len,
            max_encoder_len=self._loaded.max_encoder_len or 0,
            vocab_size=model.vocab_size,
            num_layers=len(mechanisms),
            num_heads=getattr(self._loaded.config, "num_heads", 0),
            dtype=str(parameter.dtype).removeprefix("torch."),
            quantization=quantization_of(model),
            device=str(parameter.device),
            chat=self._tokenizer.chat,
            note=self._note,
            recommended_sampling=self._recommended,
        )

    def submit(self, task: TextTask, state: PromptState | None = None) -> None:
        """Start a task before the next engine step; its outputs are delivered. Raises a `UserError` if refused."""
        self._loop.submit(self._request(task, state))

    def prefill(self, task: TextTask) -> None:
        """Like `submit`, but only compute the prompt: the only output has its state."""
        self._loop.submit(self._request(task).prefill())

    def _request(self, task: TextTask, state: PromptState | None = None) -> Request:
        prompt, params = self._tokenizer.with_images(task.prompt), task.params
        if isinstance(params, SamplingParams):
            params = params.resolved(self._recommended)
        return Request(
            id=task.id,
            token_ids=prompt.token_ids,
            prompt_embeddings=None if self._images is None else self._images.embeddings(prompt),
            encoder_token_ids=self._tokenizer.encoder_ids(task.prompt),
            params=params,
            bad_words=self._tokenizer.words(task.params),
            deadline=None if task.timeout is None else time.monotonic() + task.timeout,
            scope=task.tenant,
            tenant=task.tenant,
            adapter=self._adapters.find(task.adapter) if task.adapter else None,
            resume=task.resume,
            state=state,
        )

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder, for tasks to use from now on; raises a `UserError` if it is refused."""
        self._require_whole(f"adapter {name!r}")
        self._adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter: no further task can use it; running ones continue."""
        self._adapters.unload(name)

    def cancel(self, task_id: str) -> None:
        """Stop a task before the next engine step."""
        self._loop.cancel(task_id)

    def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens of a prompt and the text that was tokenised."""
        return self._tokenizer.tokenize(prompt)

    def attention_maps(self, request: AttentionMapsRequest, adapter: str = "") -> list[AttentionMap]:
        """The attention weights of a prompt, one map per layer, with the adapter if one is named."""
        self._require_whole("attention maps")
        with self._adapters.using(adapter):
            return compute_maps(self._loaded, request, self._tokenizer)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread and all ranks are running."""
        return self._loop.alive and (self._ranks is None or self._ranks.alive)

    def stats(self) -> EngineStats:
        """The current load of the engine, and its counters."""
        return with_process(self._loop.stats())

    def stop(self, timeout: float, error: AttnError | None = None) -> None:
        """See `ModelHost.stop`."""
        self._loop.drain(timeout)
        self._loop.stop(error)
        if self._ranks is not None:
            self._ranks.stop()

    def _require_whole(self, what: str) -> None:
        if self._ranks is not None:
            raise Incompatible(f"{what}: not supported with tensor_parallel_size above 1; load the model with 1")
