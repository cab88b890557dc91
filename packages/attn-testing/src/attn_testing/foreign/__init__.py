"""Laws of attention for other packages' implementations: functions of queries, keys and values, and torch modules."""

from attn_testing.foreign.report import Examined, examine, markdown
from attn_testing.foreign.subject import Foreign, ForeignFunction, ForeignModule
from attn_testing.laws.foreign import FOREIGN_LAWS

__all__ = ["FOREIGN_LAWS", "Examined", "Foreign", "ForeignFunction", "ForeignModule", "examine", "markdown"]
