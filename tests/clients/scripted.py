"""A model that repeats what stood a fixed number of tokens before, and a chat template that ends each prompt with what
is to be said, by the state of the conversation. So agents can do a task whatever the wits of a small model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_schema.decoder import DecoderConfig

SHIFT = 128
"""How many tokens before stands what is said."""


def call(name: str, arguments: dict[str, Any]) -> str:
    """A call as the template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


WEATHER = {"city": "Rome", "hot": True}
SCRIPT = {
    "hello": "Hello there.",
    "json": json.dumps(WEATHER),
    "first": call("add", {"a": 2, "b": 3}),
    "second": call("multiply", {"a": 5, "b": 4}),
    "last": "The result is 20.",
    "weather": call("Weather", WEATHER),
    "result": call("final_result", WEATHER),
    "object": call("json", WEATHER),
    "answer": call("final_answer", {"answer": "20"}),
}
"""What is said in each state of a conversation."""
TEMPLATE = (
    f"{{% set script = {json.dumps(SCRIPT)} %}}{{% set shift = {SHIFT} %}}"
    "{% macro say(state) %}{% set said = script[state] %}"
    "{% if tools and 'Numbers-add' in tools | tojson %}"  # with the name of a class
    "{% set said = said | replace('\"add', '\"Numbers-add') | replace('\"mul', '\"Numbers-mul') %}{% endif %}"
    "{{ said }}{{ '<|end|>' * (shift - said | length) }}{% endmacro %}"
    "{% set here = namespace(results=0, json=false) %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n'
    # Some frameworks send the results of calls as texts.
    "{% if m.role == 'tool' or 'Observation' in (m.content or '')[:40] %}"
    "{% set here.results = here.results + 1 %}{% endif %}"
    "{% if m.role == 'user' and 'JSON' in (m.content or '') %}{% set here.json = true %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% set names = tools | map(attribute='function') | map(attribute='name') | join(' ') if tools else '' %}"
    "{% if 'Weather' in names %}{{ say('weather') }}{% elif names == 'json' %}{{ say('object') }}"
    "{% elif 'final_result' in names %}{{ say('result') }}"
    "{% elif 'add' in names and here.results == 0 %}{{ say('first') }}"
    "{% elif 'add' in names and here.results == 1 %}{{ say('second') }}"
    "{% elif 'final_answer' in names %}{{ say('answer') }}{% elif 'add' in names %}{{ say('last') }}"
    "{% elif here.json %}{{ say('json') }}{% else %}{{ say('hello') }}{% endif %}{% endif %}"
)


def save_scripted(folder: Path) -> None:
    """Write the model to a folder. A token is a byte, so that a text has one spelling."""
    plain = byte_pair_tokenizer(["a"], 260)
    backend = plain.backend
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True)])
    settings = dataclasses.replace(plain.settings, chat_template=TEMPLATE, eos_token="<|end|>")
    tokenizer = Tokenizer(backend, settings)
    size, hidden = tokenizer.vocab_size, 288
    config = DecoderConfig(
        vocab_size=size, max_seq_len=8192, hidden_size=hidden, num_layers=1, num_heads=1, mechanism="mha",
        intermediate_size=8, tie_word_embeddings=False, positions="rotary", norm="rms",
    )  # fmt: skip
    model = Decoder(config)
    attention = model.blocks[0].attention
    # The query is the key, turned by the shift: their product is largest that many tokens before.
    key = torch.ones(2, hidden // 2)
    angles = (SHIFT - 1) * 10000.0 ** -(torch.arange(hidden // 2) * 2 / hidden)
    query = torch.stack([angles.cos() + angles.sin(), angles.cos() - angles.sin()])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        model.embedding.weight[:, :size] = torch.eye(size)
        model.embedding.weight[:, -1] = 1
        attention.query.weight[:, -1] = query.flatten() * 4
        attention.key.weight[:, -1] = key.flatten()
        attention.value.weight[:size, :size] = torch.eye(size)
        attention.output.weight[:size, :size] = torch.eye(size) * 100
        model.unembedding.weight[:, :size] = torch.eye(size) * 4
    save_model(folder, model, tokenizer)
