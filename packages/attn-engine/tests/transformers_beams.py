"""The beam search of transformers over one of the small models, which runs the whole sequence again at every step."""

from __future__ import annotations

import torch
from attn_core import RaggedBatch, installed
from attn_core.stores import StoreSize
from small_models import CONTEXT, VOCABULARY, SmallModel
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

EARLY_STOPPING = {"true": True, "false": False, "never": "never"}


class Whole(PreTrainedModel, GenerationMixin):
    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, model: SmallModel, source: tuple[int, ...] | None) -> None:
        super().__init__(PretrainedConfig(vocab_size=VOCABULARY, is_encoder_decoder=False, num_hidden_layers=1))
        self.model = model
        self.source = source

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_):
        return {"input_ids": input_ids}

    def forward(self, input_ids: Tensor, **_) -> CausalLMOutput:
        return CausalLMOutput(logits=torch.stack([self.logits(row) for row in input_ids])[:, None])

    def logits(self, row: Tensor) -> Tensor:
        size = StoreSize(tokens=CONTEXT, requests=1, dtype="float64")
        store = installed().caches.get("contiguous").create(self.model.state_specs(), size)
        store.admit(0)
        store.reserve(0, len(row))
        if self.source is not None:
            store.write_source(0, self.model.encode(torch.tensor(self.source)))
        batch = RaggedBatch.of([len(row)], [0], torch.tensor)
        return self.model.logits(self.model.step(row, batch, store.view(batch, [0])))[-1]


def beam_search(model: SmallModel, request, end_ids) -> list[tuple[list[int], float]]:
    """Tokens and score of the best completions of an engine's request, as transformers finds them."""
    task = request.params
    options = GenerationConfig(
        num_beams=task.num_beams,
        num_return_sequences=task.n,
        length_penalty=task.length_penalty,
        early_stopping=EARLY_STOPPING[task.early_stopping],
        max_new_tokens=task.max_new_tokens,
        min_new_tokens=task.min_new_tokens or None,
        repetition_penalty=task.repetition_penalty,
        eos_token_id=None if task.ignore_eos else sorted(end_ids),
        pad_token_id=VOCABULARY,
        do_sample=False,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    whole = Whole(model, request.encoder_token_ids)
    prompt = torch.tensor([request.token_ids])
    with torch.inference_mode():
        found = whole.generate(prompt, generation_config=options)
    rows = found.sequences[:, prompt.shape[1] :].tolist()
    tokens = [[token for token in row if token < VOCABULARY] for row in rows]
    return list(zip(tokens, found.sequences_scores.tolist(), strict=True))
