"""An encoder that gives each word a tag."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from attn_models.decoder.checks import require_count
from attn_models.decoder.initial import initialise
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder


@dataclass(frozen=True, kw_only=True)
class TaggerConfig:
    """An encoder and how many `classes` of tags there are; raises `InvalidValue` for none."""

    encoder: EncoderConfig
    classes: int

    def __post_init__(self) -> None:
        require_count("classes", self.classes)


class Tagger(nn.Module):
    """softmax(W h + b) over an encoder's rows h (Devlin et al. 2019, arXiv 1810.04805, figure 4d)."""

    def __init__(self, config: TaggerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config.encoder)
        self.classifier = nn.Linear(config.encoder.width, config.classes)
        initialise(self.classifier)

    def forward(self, tokens: Tensor, keep: Tensor | None = None, depths: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, classes]; arguments as of `Encoder.forward`."""
        scores: Tensor = self.classifier(self.encoder(tokens, keep, depths=depths))
        return scores
