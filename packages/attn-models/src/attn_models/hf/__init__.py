"""Mechanisms inside Hugging Face's transformers.

import attn_models.hf
attn_models.hf.register()
AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attn_sparsemax")
"""

from attn_models.hf.register import register, register_mechanism

__all__ = ["register", "register_mechanism"]
