"""Adapters of decoder families in Hugging Face's transformers, as descriptions, one file each."""

from attn_models.adapters.families.bloom import BloomAdapter
from attn_models.adapters.families.cohere import Cohere2Adapter, CohereAdapter
from attn_models.adapters.families.falcon import FalconAdapter
from attn_models.adapters.families.gemma import Gemma2Adapter, Gemma3Adapter
from attn_models.adapters.families.glm import Glm4Adapter, GlmAdapter
from attn_models.adapters.families.gpt_bigcode import GptBigcodeAdapter
from attn_models.adapters.families.gpt_neox import GptNeoxAdapter
from attn_models.adapters.families.gpt_oss import GptOssAdapter
from attn_models.adapters.families.gptj import GptjAdapter
from attn_models.adapters.families.granite import GraniteAdapter
from attn_models.adapters.families.llama4 import Llama4Adapter
from attn_models.adapters.families.llama_relatives import (
    Ernie45Adapter,
    Exaone4Adapter,
    HeliumAdapter,
    MinistralAdapter,
    SeedOssAdapter,
)
from attn_models.adapters.families.mamba2 import Mamba2Adapter
from attn_models.adapters.families.mpt import MptAdapter
from attn_models.adapters.families.olmo3 import Olmo3Adapter
from attn_models.adapters.families.opt import OptAdapter
from attn_models.adapters.families.phi3 import Phi3Adapter
from attn_models.adapters.families.qwen2 import Qwen2Adapter, Qwen3Adapter
from attn_models.adapters.families.qwen2_moe import OlmoeAdapter, Qwen2MoeAdapter
from attn_models.adapters.families.qwen3_moe import Qwen3MoeAdapter
from attn_models.adapters.families.smollm3 import SmolLm3Adapter
from attn_models.adapters.families.stablelm import PhiAdapter, StableLmAdapter
from attn_models.adapters.families.starcoder2 import Starcoder2Adapter

FAMILIES = (
    Qwen2Adapter(),
    Qwen3Adapter(),
    Phi3Adapter(),
    Qwen3MoeAdapter(),
    SmolLm3Adapter(),
    GraniteAdapter(),
    GptNeoxAdapter(),
    FalconAdapter(),
    Starcoder2Adapter(),
    OptAdapter(),
    BloomAdapter(),
    CohereAdapter(),
    Cohere2Adapter(),
    Gemma2Adapter(),
    Gemma3Adapter(),
    GlmAdapter(),
    Glm4Adapter(),
    Olmo3Adapter(),
    MinistralAdapter(),
    GptjAdapter(),
    MptAdapter(),
    GptOssAdapter(),
    Llama4Adapter(),
    Mamba2Adapter(),
    SeedOssAdapter(),
    Ernie45Adapter(),
    HeliumAdapter(),
    StableLmAdapter(),
    PhiAdapter(),
    Qwen2MoeAdapter(),
    OlmoeAdapter(),
    Exaone4Adapter(),
    GptBigcodeAdapter(),
)
