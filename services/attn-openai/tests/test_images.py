"""Images of OpenAI's messages reach a model that sees, and are refused for one that does not."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx2
import pytest
from attn_models.vision_language.example import picture, write_vision_model
from attn_schema import EngineConfig

pytest.importorskip("PIL")


def shown(seed: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(picture(seed)).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.fixture
async def seeing(home: Path, inference: Any, url: str) -> str:
    write_vision_model(home / "models" / "seeing")
    await inference.served.load("seeing", "", EngineConfig(num_threads=1))
    return "seeing"


async def test_the_answer_depends_on_the_image_and_on_its_place(seeing: str, client: Any) -> None:
    async def ask(*parts: dict[str, Any]) -> tuple[str, int]:
        messages = [{"role": "user", "content": list(parts)}]
        made = await client.chat.completions.create(
            model=seeing, messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        return made.choices[0].message.content, made.usage.prompt_tokens

    one, length = await ask(shown(1), said("what is it"))
    assert await ask(shown(1), said("what is it")) == (one, length)
    assert (await ask(shown(2), said("what is it")))[0] != one
    assert await ask(said("what is it"), shown(1)) != (one, length)
    assert (await ask(said("what is it")))[1] < length


async def test_a_model_that_sees_no_images_says_so(http: httpx2.AsyncClient, seeing: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": [shown(1), said("x")]}]}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "the model takes no images" in answer.json()["error"]["message"]
    body |= {"model": seeing, "messages": [{"role": "user", "content": [shown(1)] * 65}]}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "at most 64" in answer.json()["error"]["message"]
