#!/usr/bin/env bash
# tokenizers 0.23.3, decoder `ByteFallback` (Llama 2, Mistral, Gemma): one would expect that the text of complete
# characters stays what it is while the next character is still incomplete. A whole run of neighbouring byte tokens is
# decoded at once: as long as its last character is incomplete, every byte of the run is U+FFFD, those of complete
# characters too. So the decoding of the first n tokens is no prefix of that of n + 1, by any number of characters.
# Seen for the bytes of "é" and U+1F916 after "ok": oké, then ok and three, four, five U+FFFD, then oké and U+1F916.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, decoders, models

pieces = ["<unk>", "ok", *(f"<0x{byte:02X}>" for byte in range(256))]
vocabulary = {piece: place for place, piece in enumerate(pieces)}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
ids = [1, *(byte + 2 for byte in "é\U0001f916".encode())]
seen = [tokenizer.decode(ids[:count]) for count in range(1, len(ids) + 1)]
print(f"tokenizers {tokenizers.__version__}: {seen}")
bad = "\ufffd"
assert seen == ["ok", f"ok{bad}", "oké", f"ok{bad * 3}", f"ok{bad * 4}", f"ok{bad * 5}", "oké\U0001f916"], seen
PYTHON
