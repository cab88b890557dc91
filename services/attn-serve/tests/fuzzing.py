"""Requests drawn from a seed: most are valid, with every option at its bounds; others are wrong in one or many ways."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from attn.v1 import common_pb2, inference_pb2, model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub

VALID = 0.75
"""Share of requests that are valid as far as can be said without a model."""
TEXTS = ("To be", "a", "?", "x" * 200, "the quick brown fox", "A\n", " ")
ODD_TEXTS = ("", "é", "\x00", "𝔘", "x" * 5000, "\u202eabc", "{{ 7*7 }}", "<|endoftext|>", "%n%s", "a" * 255)
REGEXES = ("[a-c]{2,5}", "(yes|no)", "[A-Z][a-z]*", "a|b|c", "x?", ".{1,4}")
ODD_REGEXES = (
    "(",
    "€+",
    "[0-9]{3}",
    "a{1000}",
    "(?=a)b",
    "[[:alpha:]]",
    "\\",
    "a{3,1}",
    ".*.*.*.*.*b",
    "[^\\x00-\\xff]",
    "",
)
SCHEMAS = ('{"enum": ["yes", "no"]}', '{"type": "null"}', '{"const": "a"}')
ODD_SCHEMAS = (
    "",
    "{",
    "[]",
    "1",
    '{"type": "foo"}',
    '{"$ref": "#"}',
    '{"type": "object"}',
    '{"minimum": 1e999}',
    "null",
)
LARK = ("start: /[a-c]+/", 'start: "yes" | "no"')
ODD_LARK = ("start: start", "start: undefined", "no start", 'start: "é"', "%llguidance {}\nstart: /a/")
NUMBERS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    2.0,
    1e-45,
    1e-38,
    1e38,
    3.4e38,
    math.inf,
    -math.inf,
    math.nan,
    1e-3,
    1000.0,
    65504.0,
)
INTEGERS = (0, 1, -1, 2, 3, 64, 255, 256, 257, 2**15, 2**31 - 1, -(2**31))

ODD_NAMES = ("", "nothing", "x" * 5000, "../tiny", "tiny\n", "é" * 2500, "tiny@" + "v" * 5000, "\x00")
ODD_METADATA = (
    ("x-request-id", "r" * 5000),
    ("x-request-id", ""),
    ("authorization", "Bearer " + "t" * 5000),
    ("authorization", "t" * 5000),
    ("user", "u" * 5000),
    ("user-bin", bytes(range(256)) * 20),
    ("u" * 200, "x"),
    ("traceparent", "00-" + "0" * 5000),
)
"""Together never more than the 8 kB of headers beyond which gRPC itself refuses a call."""
ODD_SHARE = 0.06
"""Share of requests that are about models and adapters, by names that there are none of."""

FIELDS = inference_pb2.SamplingParams.DESCRIPTOR.fields
FLOATS = [
    field.name for field in FIELDS if field.cpp_type == field.CPPTYPE_FLOAT or field.cpp_type == field.CPPTYPE_DOUBLE
]
COUNTS = [field.name for field in FIELDS if field.cpp_type == field.CPPTYPE_INT32]


def is_repeated(name: str) -> bool:
    field = inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name]
    return bool(field.is_repeated)


@dataclass(frozen=True)
class Manner:
    """How a call is made: with what metadata, when it is given up, and how its request is sent.

    `messages` other than None sends so many where one is expected; without `closes` the client's half stays open.
    """

    metadata: tuple[tuple[str, str | bytes], ...] = ()
    after_first: bool = False
    after_seconds: float | None = None
    messages: int | None = None
    closes: bool = True


class RequestFuzzer:
    """Draws requests; equal seeds draw equal ones."""

    def __init__(self, seed: int, models: tuple[str, ...]) -> None:
        self.rng = random.Random(seed)
        self.models = models

    def next(self) -> tuple[str, Any, bool]:
        """A method, a request of it, and whether the request was meant to be valid."""
        if self.rng.random() < ODD_SHARE:
            return self._about_models()
        valid = self.rng.random() < VALID
        method = self.rng.choices(("Generate", "Score", "Tokenize", "Embed"), (80, 8, 8, 4))[0]
        model = self.rng.choice(self.models)
        if not valid and self.rng.random() < 0.05:
            model = self.rng.choice(ODD_NAMES)
        prompt = self._prompt(valid)
        if method == "Generate":
            sampling = self._valid_sampling() if valid else self._odd_sampling()
            return method, inference_pb2.GenerateRequest(model=model, prompt=prompt, sampling=sampling), valid
        if method == "Score":
            top = self.rng.choice((0, 1, 5)) if valid else self.rng.choice(INTEGERS)
            prompts = [prompt] * (1 if valid else self.rng.randrange(4))
            return method, inference_pb2.ScoreRequest(model=model, prompts=prompts, top_logprobs=top), valid
        if method == "Tokenize":
            return method, inference_pb2.TokenizeRequest(model=model, prompt=prompt), valid
        # A model that is not an encoder refuses it, whatever it says.
        return method, inference_pb2.EmbedRequest(model=model, texts=[self._text(valid)]), False

    def _about_models(self) -> tuple[str, Any, bool]:
        """A request to load, unload or describe a model or an adapter that there cannot be."""
        name, other = self.rng.choice(ODD_NAMES), self.rng.choice(ODD_NAMES)
        source = self.rng.choice(("tiny", "x" * 5000, "/" + "x/" * 2500, "~nobody-here/x", "\x00", "../" * 100))
        requests = {
            "GetModel": model_pb2.GetModelRequest(name=name),
            "ListModels": model_pb2.ListModelsRequest(page_size=self.rng.choice(INTEGERS), page_token=name),
            "UnloadModel": model_pb2.UnloadModelRequest(name=name),
            "LoadModel": model_pb2.LoadModelRequest(name=name, source=source, base_model=other),
            "ScaleModel": model_pb2.ScaleModelRequest(name=name),
        }
        method = self.rng.choice(list(requests))
        return method, requests[method], False

    def manner(self) -> Manner:
        """How a call is made: most are made as all clients do."""
        kind = self.rng.random()
        metadata = (self.rng.choice(ODD_METADATA),) if self.rng.random() < 0.1 else ()
        if kind < 0.05:
            return Manner(metadata, after_first=True)
        if kind < 0.15:
            return Manner(metadata, after_seconds=self.rng.choice((0.0, self.rng.random() / 20)))
        if kind < 0.2:
            return Manner(metadata, messages=self.rng.choice((0, 1, 2)), closes=self.rng.random() < 0.5)
        return Manner(metadata)

    def _text(self, valid: bool) -> str:
        if valid or self.rng.random() < 0.5:
            return self.rng.choice(TEXTS)
        return self.rng.choice(ODD_TEXTS)

    def _prompt(self, valid: bool) -> Any:
        kind = self.rng.random()
        if kind < 0.6:
            return common_pb2.Prompt(text=self._text(valid))
        if kind < 0.9 or valid:
            most = 20 if valid else self.rng.choice((0, 3, 300))
            ids = [self.rng.randrange(50) for _ in range(self.rng.randint(1, 20) if valid else most)]
            if not valid and ids and self.rng.random() < 0.5:
                ids[0] = self.rng.choice((2**31 - 1, 60, 1000, 2**20))
            return common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=ids))
        if kind < 0.95:
            said = common_pb2.ChatMessage(
                role=self.rng.choice(("user", "", "x" * 300)), content=self._text(valid=False)
            )
            return common_pb2.Prompt(chat=common_pb2.Chat(messages=[said] * self.rng.randrange(3)))
        return common_pb2.Prompt()

    def _valid_sampling(self) -> Any:
        rng = self.rng
        options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 6)}
        if rng.random() < 0.5:
            options |= {
                "temperature": rng.choice((1e-45, 1e-30, 0.1, 1.0, 2.0, 1e30, 3e38)),
                "seed": rng.getrandbits(64),
            }
        choices: dict[str, tuple[Any, ...]] = {
            "top_k": (1, 2, 50, 2**31 - 1),
            "top_p": (1e-30, 0.1, 0.9, 1.0),
            "min_p": (0.0, 0.5, 1.0),
            "typical_p": (1e-30, 0.2, 1.0),
            "repetition_penalty": (0.001, 0.5, 1.0, 1.3, 1000.0),
            "frequency_penalty": (-2.0, 0.5, 2.0),
            "presence_penalty": (-2.0, 0.5, 2.0),
            "n": (1, 2, 5),
            "num_beams": (1, 2, 4),
            "top_logprobs": (0, 1, 20),
        }
        for name in rng.sample(list(choices), rng.randrange(4)):
            options[name] = rng.choice(choices[name])
        if options.get("num_beams", 1) > 1:
            options = {name: options[name] for name in ("max_new_tokens", "num_beams")}
        if rng.random() < 0.2:
            options["stop"] = [rng.choice(("a", "the", "?"))]
        if rng.random() < 0.2:
            kind, grammars = rng.choice((("regex", REGEXES), ("json_schema", ()), ("lark", LARK)))
            grammar = rng.choice(grammars or REGEXES)
            kind = kind if grammars else "regex"
            options["structured_output"] = inference_pb2.StructuredOutput(**{kind: grammar})
        elif rng.random() < 0.2:
            options["logit_bias"] = {
                rng.randrange(50): rng.choice((-100.0, 100.0, 0.0)) for _ in range(rng.randrange(4))
            }
        return inference_pb2.SamplingParams(**options)

    def _odd_sampling(self) -> Any:
        rng = self.rng
        params = inference_pb2.SamplingParams(max_new_tokens=rng.randint(1, 6))
        for _ in range(rng.randint(1, 4)):
            kind = rng.random()
            if kind < 0.4:
                name = rng.choice(FLOATS)
                if not is_repeated(name):
                    setattr(params, name, rng.choice(NUMBERS))
            elif kind < 0.7:
                name = rng.choice(COUNTS)
                if not is_repeated(name):
                    setattr(params, name, rng.choice(INTEGERS))
            elif kind < 0.8:
                params.stop.extend([rng.choice(("", "a", "x" * 3000, "é"))] * rng.choice((1, 2, 17)))
            elif kind < 0.9:
                kinds = (("regex", ODD_REGEXES + REGEXES), ("json_schema", ODD_SCHEMAS + SCHEMAS), ("lark", ODD_LARK))
                field, grammars = rng.choice(kinds)
                params.structured_output.CopyFrom(inference_pb2.StructuredOutput(**{field: rng.choice(grammars)}))
            else:
                for _ in range(rng.choice((1, 3, 1100))):
                    params.logit_bias[rng.choice((0, 1, 49, 60, 2**31 - 3)) + rng.randrange(3)] = rng.choice(NUMBERS)
        return params


SERVICES = {"Generate": "Inference", "Score": "Inference", "Tokenize": "Inference", "Embed": "Inference"}
"""Services by method; the others are those of models."""
PATIENCE_SECONDS = 300.0
"""The deadline of calls, which no machine is so slow as to miss."""
OPEN_SECONDS = 0.2
"""How long the client's half of a call stays open that is not closed."""


def begun(channel: grpc.aio.Channel, method: str, request: Any, manner: Manner) -> Any:
    """The call, made in this manner."""
    service = SERVICES.get(method, "Model")
    if manner.messages is None:
        stub = InferenceServiceStub(channel) if service == "Inference" else ModelServiceStub(channel)
        return getattr(stub, method)(request, timeout=PATIENCE_SECONDS, metadata=manner.metadata)

    async def messages() -> AsyncIterator[bytes]:
        for _ in range(manner.messages or 0):
            yield request.SerializeToString()
        if not manner.closes:
            await asyncio.sleep(OPEN_SECONDS)

    path = f"/attn.v1.{service}Service/{method}"
    return channel.stream_stream(path)(messages(), timeout=2, metadata=manner.metadata)


async def answer_to(
    channel: grpc.aio.Channel, method: str, request: Any, manner: Manner
) -> tuple[grpc.StatusCode, str]:
    """The code with which a call ends, and what is said of it."""
    call = begun(channel, method, request, manner)
    if manner.after_seconds is not None:
        asyncio.get_running_loop().call_later(manner.after_seconds, call.cancel)
    try:
        if method == "Generate" or manner.messages is not None:
            async for _ in call:
                if manner.after_first:
                    call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError:
        pass
    except BaseException:
        if not call.cancelled():
            raise
    return await call.code(), str(await call.details())


def described(method: str, request: Any, manner: Manner) -> str:
    """A request in one line, for the report of a failure."""
    made = f"messages={manner.messages} closes={manner.closes} metadata={str(manner.metadata)[:100]}"
    return f"{method}, {made}: {json.dumps(str(request))[:800]}"


FAULTS = {"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNAVAILABLE"}
"""Codes that no request may be answered with."""
CLIENT_LIBRARY = "Internal error from Core"
"""What gRPC's own client says where a call was answered before it could send all: no server has said it.

It says so of streams of requests alone (`_write` in grpc/aio/_call.py), which only odd calls send here.
"""


def outcome_of(code: grpc.StatusCode, details: str, manner: Manner) -> str:
    """How a call ended, in a word: the server's code, or that of the client's library alone."""
    own = manner.messages is not None and details == CLIENT_LIBRARY
    return "said by the client's library" if own else code.name


async def fuzz(
    channel: grpc.aio.Channel,
    seed: int,
    count: int,
    together: int = 16,
    models: tuple[str, ...] = ("tiny", "tiny-linear"),
) -> tuple[Counter[str], list[str]]:
    """How so many requests ended, `together` at a time, and those that ended with a fault of the server."""
    fuzzer, ended, faults, left = RequestFuzzer(seed, models), Counter[str](), [], count

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            method, request, valid = fuzzer.next()
            manner = fuzzer.manner()
            code, details = await answer_to(channel, method, request, manner)
            outcome = outcome_of(code, details, manner)
            ended[outcome] += 1
            ended["meant valid"] += valid
            plain = valid and manner.messages is None
            ended["valid and refused"] += plain and code is grpc.StatusCode.INVALID_ARGUMENT
            if outcome in FAULTS:
                faults.append(f"{outcome} ({details[:200]}): {described(method, request, manner)}")

    await asyncio.gather(*(work() for _ in range(together)))
    return ended, faults
