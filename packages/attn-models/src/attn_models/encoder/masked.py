"""An encoder that guesses tokens which were masked."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from attn_models.decoder.feedforward import ACTIVATIONS


class MaskedLanguageModel(nn.Module):
    """norm(f(W h + b)) E^T + c over the rows h of an encoder whose embedding is E (Devlin et al. 2019,
    arXiv 1810.04805, section 3.1; W, the norm and c are their code's).

    `encoder` is an `Encoder` or a `Reformer`. Learned besides its weights: `transform`, `norm` and `bias`.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        vocabulary, width = encoder.embedding.weight.shape
        self.encoder = encoder
        self.vocabulary: int = vocabulary
        self.transform = nn.Linear(encoder.size, width)
        self.activation = ACTIVATIONS[encoder.config.feed_forward]()
        self.norm = nn.LayerNorm(width, eps=encoder.config.norm_eps)
        self.bias = nn.Parameter(self.transform.weight.new_zeros(vocabulary))

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of token ids [batch, tokens]; `keep` as `Encoder.forward`."""
        return self.guess(self.encoder(tokens, keep))

    def guess(self, rows: Tensor) -> Tensor:
        """Logits [..., vocabulary] of an encoder's rows [..., size]."""
        shaped = self.norm(self.activation(self.transform(rows)))
        return linear(shaped, self.encoder.embedding.weight, self.bias)
