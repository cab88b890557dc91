"""What do the block formats of GGUF files cost in quality, in attn's engine and in llama.cpp on the same file?

llama.cpp's own quantiser writes the files, from one GGUF file of the model. Perplexity is computed over the same
windows of tokens for all systems. Each row reports how often its most likely token equals that of the reference
(`float32`), and the mean absolute difference of the log probability of the text's tokens; both are also reported
relative to llama.cpp on the same file.

    python benchmarks/stored_blocks_cpu.py MODEL.gguf TEXT --llamacpp FOLDER_OF_NODE_MODULES

TEXT is a UTF-8 text, or a treebank (.conllu.gz), of which the sentences are used.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import write_report

FILES = {"F32": 0, "Q8_0": 7, "Q6_K": 18, "Q4_K_M": 15, "Q4_1": 3, "Q4_0": 2}
"""llama.cpp's names of the file types, with their numbers (`llama_ftype`)."""
FORMS = ("none", "bfloat16", "int8", "int4")
"""The weight formats in which attn's engine runs the F32 file."""
IN_BLOCKS = ("auto", "int8", "int4")
"""The formats for the other files: `auto` does not round inputs, the others round them to int8 for low-bit blocks."""
NODE = """
import {getLlama} from "node-llama-cpp";
import {readFileSync} from "fs";
const {model: modelPath, windows: path, threads} = JSON.parse(process.argv[2]);
const windows = JSON.parse(readFileSync(path));
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath});
const size = Math.max(...windows.map((w) => w.length));
const context = await model.createContext({contextSize: size + 8, threads, batchSize: size + 8});
const sequence = context.getSequence();
for (const window of windows) {
  await sequence.clearHistory();
  const asked = window.slice(0, -1).map((token, i) => [token, {generateNext: {
    logits: {filter: {tokens: [window[i + 1]], includeTop: 1}}, totalLogitWeight: true}}]);
  const found = await sequence.controlledEvaluate(asked);
  console.log(JSON.stringify(found.map(({next}, i) => {
    const [best, most] = [...next.logits.entries()].reduce((a, b) => (b[1] > a[1] ? b : a));
    return [next.logits.get(window[i + 1]) - most - Math.log(next.totalLogitWeight), best];
  })));
}
process.exit(0);
"""


@dataclass(frozen=True)
class Judged:
    """The log probability of each token of the text, and the most likely token at its position.

    The first token of each window is left out.
    """

    log_probabilities: list[float]
    likeliest: list[int]

    def row(self, beside: Judged, name: str) -> dict[str, Any]:
        """The columns that compare these results with those of another system."""
        count = len(self.likeliest)
        same = sum(a == b for a, b in zip(self.likeliest, beside.likeliest, strict=True))
        off = sum(abs(a - b) for a, b in zip(self.log_probabilities, beside.log_probabilities, strict=True))
        return {f"same_token_as_{name}": round(same / count, 4), f"nats_off_{name}": round(off / count, 5)}

    @property
    def perplexity(self) -> float:
        """The perplexity of the whole text."""
        return math.exp(-sum(self.log_probabilities) / len(self.log_probabilities))


def text_of(path: Path) -> str:
    if path.name.endswith(".conllu.gz"):
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        return "\n".join(line.removeprefix("# text = ") for line in lines if line.startswith("# text = "))
    return path.read_text(encoding="utf-8")


def quantised(source: Path, target: Path, kind: int, libraries: Path) -> None:
    """Quantise the file `source` to `target` with `llama_model_quantize`."""

    class Parameters(ctypes.Structure):  # the first fields of llama_model_quantize_params, and space for the others
        _fields_ = (
            ("threads", ctypes.c_int32),
            ("kind", ctypes.c_int32),
            ("output", ctypes.c_int32),
            ("embedding", ctypes.c_int32),
            ("requantise", ctypes.c_bool),
            ("others", ctypes.c_ubyte * 256),
        )

    # Loaded in this order, each library finds the earlier ones by name.
    found = [next(libraries.glob(pattern)) for pattern in ("libggml-base.so", "libggml.v*.so", "libllama.v*.so")]
    library = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in found][-1]
    library.llama_model_quantize_default_params.restype = Parameters
    library.llama_backend_init()
    given = library.llama_model_quantize_default_params()
    given.kind, given.requantise = kind, True
    if library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(given)):
        raise RuntimeError(f"llama.cpp did not write {target}")


def ours(args: argparse.Namespace, model: Path, form: str, windows: list[list[int]]) -> Judged:
    import torch
    from attn_models.loading import load_model

    torch.set_num_threads(args.threads)
    loaded = load_model(model, quantization=form)
    given, likeliest = [], []
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor(window)
            scores = torch.log_softmax(loaded.model(ids[None, :-1])[0].float(), -1)
            given += scores.gather(1, ids[1:, None])[:, 0].tolist()
            likeliest += scores.argmax(-1).tolist()
    return Judged(given, likeliest)


def theirs(args: argparse.Namespace, model: Path, windows: Path) -> Judged:
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "node_modules").symlink_to((args.llamacpp / "node_modules").resolve())
        (Path(work) / "peer.mjs").write_text(NODE)
        asked = json.dumps({"model": str(model), "windows": str(windows), "threads": args.threads})
        done = subprocess.run(["node", f"{work}/peer.mjs", asked], stdout=subprocess.PIPE, text=True, check=True)
    pairs = [pair for line in done.stdout.splitlines() if line.startswith("[") for pair in json.loads(line)]
    return Judged([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def windows_of(args: argparse.Namespace, model: Path) -> list[list[int]]:
    """The token ids of the text from its beginning, split into windows."""
    from attn_models.tokenizers import tokenizer_from_gguf
    from attn_models.weights import read_gguf_header

    ids = tokenizer_from_gguf(read_gguf_header(model)).encode(text_of(args.text)[: 8 * args.tokens])[: args.tokens]
    return [ids[start : start + args.window] for start in range(0, len(ids), args.window)]


def kinds(model: Path) -> str:
    """The storage types of a file's matrices, with their counts."""
    from attn_models.weights import read_gguf_header

    found = Counter(tensor.type for tensor in read_gguf_header(model).tensors.values() if len(tensor.shape) == 2)
    return ", ".join(f"{count} {kind}" for kind, count in found.most_common())


def rows(args: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    libraries = next(args.llamacpp.glob("node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"))
    windows = windows_of(args, args.model)
    (work / "windows.json").write_text(json.dumps(windows))
    reference = None
    for name, kind in FILES.items():
        file = work / f"{name}.gguf"
        quantised(args.model.resolve(), file, kind, libraries)
        facts = {"file": name, "matrices": kinds(file), "megabytes": round(file.stat().st_size / 1e6, 1)}
        peer = theirs(args, file, work / "windows.json")
        for form in FORMS if name == "F32" else IN_BLOCKS:
            found = ours(args, file, form, windows)
            reference = reference or found
            said = {"system": "attn", "quantization": form, "perplexity": round(found.perplexity, 3)}
            yield facts | said | found.row(reference, "float32") | found.row(peer, "llama_cpp")
        said = {"system": "llama.cpp", "quantization": "", "perplexity": round(peer.perplexity, 3)}
        yield facts | said | peer.row(reference, "float32")
        file.unlink()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="the model as a GGUF file")
    p.add_argument("text", type=Path, help="a text, UTF-8, or a treebank")
    p.add_argument("--llamacpp", type=Path, required=True, help="the folder in which npm installed node-llama-cpp")
    p.add_argument("--tokens", type=int, default=4096, help="how many tokens of the text")
    p.add_argument("--window", type=int, default=512, help="tokens that are read at once")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    args = p.parse_args()
    facts = {"question": "perplexity of weights in blocks", "tokens": args.tokens, "window": args.window}
    with tempfile.TemporaryDirectory() as work:
        os.environ["ATTN_HOME"] = work  # converted files are removed with the others
        write_report("stored_blocks_cpu", facts, rows(args, Path(work)), args.out)


if __name__ == "__main__":
    sys.exit(main())
