#!/usr/bin/env bash
# TRL 1.16.0, `ORPOTrainer`: the negative log likelihood of its loss is that of the prompt and the chosen answer together.
# In the paper (arXiv 2403.07691, section 4) it is that of the answer given the prompt, as TRL's own log odds are.
# Seen: `eval_nll_loss` is the mean over all tokens, 5.34, where that of the answer is 5.06.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q trl==1.16.0 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

words = ["<pad>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)).eval()
rows = Dataset.from_list([{"prompt": "abcdefgh", "chosen": "xyz", "rejected": "zz"}])
config = ORPOConfig(output_dir="out", use_cpu=True, bf16=False, report_to=[], per_device_eval_batch_size=1, max_length=64)
trainer = ORPOTrainer(model, args=config, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
theirs = trainer.evaluate()["eval_nll_loss"]
ids = torch.tensor([tokenizer("abcdefghxyz")["input_ids"] + [1]])
losses = cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")
whole, answer = losses.mean().item(), losses[-4:].mean().item()
print(f"TRL {trl.__version__}: {theirs:.4f}; prompt and answer {whole:.4f}, the answer {answer:.4f}")
assert abs(theirs - whole) < 1e-3 < abs(theirs - answer)
PYTHON
