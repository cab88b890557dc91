"""What programs that measure servers, or stand between them and their clients, are asked to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asked import ASK, HELLO, KEY, MODEL, same, tries

BIN = Path(sys.executable).parent
REQUESTS = 3


def run(command: list[str], folder: Path) -> None:
    """Run a program that must succeed."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise AssertionError(done.stdout[-300:])


@tries("guidellm")
def guidellm__benchmark(url: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.csv").write_text("prompt\n" + f"{ASK}\n" * (REQUESTS + 1))
        backend, limit = f"kind=openai_http,target={url},model={MODEL}", f"kind=max_requests,count={REQUESTS}"
        command = [str(BIN / "guidellm"), "run", "--disable-progress", "--backend", backend, "--constraint", limit]
        command += ["--profile", "kind=synchronous", "--data", "kind=csv_file,path=data.csv"]
        run([*command, "--output", "kind=json,path=out.json"], folder)
        found = json.loads((folder / "out.json").read_text())["benchmarks"][0]["requests"]
        same([each["output"] for each in found["successful"]], [HELLO] * REQUESTS)
        same(found["errored"], [])


TASK = """task: hello
dataset_path: json
dataset_kwargs: {data_files: data.jsonl}
output_type: generate_until
test_split: train
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 40}
metric_list: [{metric: exact_match}]
"""


@tries("lm-eval")
def lm_eval__generation(url: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hello.yaml").write_text(TASK)
        (folder / "data.jsonl").write_text(json.dumps({"question": ASK, "answer": HELLO}))
        given = f"model={MODEL},base_url={url}/v1/chat/completions"
        command = [str(BIN / "lm_eval"), "--model", "local-chat-completions", "--model_args", given, "--tasks", "hello"]
        run([*command, "--include_path", ".", "--apply_chat_template", "--output_path", "out"], folder)
        found = json.loads(next(folder.glob("out/**/results*.json")).read_text())
        same(found["results"]["hello"]["exact_match,none"], 1.0)


@tries("litellm (proxy)", "litellm")
def litellm_proxy__chat(url: str) -> None:
    import openai

    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        model = {"model_name": "ours", "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1"}}
        model["litellm_params"]["api_key"] = KEY
        (Path(name) / "proxy.yaml").write_text(json.dumps({"model_list": [model]}))
        command = [str(BIN / "litellm"), "--config", "proxy.yaml", "--host", "127.0.0.1", "--port", str(port)]
        environment = os.environ | {"LITELLM_MASTER_KEY": "sk-0123456789abcdef0123456789abcdef"}
        with (Path(name) / "log").open("w") as log:
            proxy = subprocess.Popen(command, cwd=name, env=environment, stdout=log, stderr=log)
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=environment["LITELLM_MASTER_KEY"])
            asked: dict[str, Any] = {"model": "ours", "messages": [{"role": "user", "content": ASK}]}
            until = time.monotonic() + 120
            while True:
                try:
                    answer = client.chat.completions.create(**asked)
                    break
                except openai.APIConnectionError:
                    if proxy.poll() is not None or time.monotonic() > until:
                        raise AssertionError((Path(name) / "log").read_text()[-300:]) from None
                    time.sleep(0.5)
            same(answer.choices[0].message.content, HELLO)
            parts = client.chat.completions.create(**asked, stream=True)
            same("".join(part.choices[0].delta.content or "" for part in parts if part.choices), HELLO)
        finally:
            proxy.terminate()
            proxy.wait()
