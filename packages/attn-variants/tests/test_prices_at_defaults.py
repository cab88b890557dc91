"""The declared FLOPs of every mechanism at its default options, of a prompt and of decoding, against those counted."""

from functools import partial

from attn_core import Step, configure, installed
from attn_core.errors import UserError
from attn_testing.laws.decoding import silent_where_nothing_decodes
from attn_testing.laws.prices import counted, plain
from attn_testing.serving import Serving
from attn_testing.subject import Case
from cases import each

PROMPT, SOURCE = 37, 5
MODES = ({"causal": True}, {"cross": True})


def decoding_cases(mechanism):
    for mode in MODES:
        try:
            config = configure(mechanism, hidden_size=16, num_heads=4, max_seq_len=4096, **mode)
        except UserError:
            continue
        case = Case(mechanism, config, mode, "")
        if silent_where_nothing_decodes(case) is None:
            yield case


@each("mechanism", installed().mechanisms)
def test_a_step_costs_at_default_options_what_is_declared(mechanism):
    for case in decoding_cases(mechanism):
        serving, remembered = Serving(case, layer=plain(case)), 0
        serving.open(0, case.source(SOURCE))
        for new in (PROMPT, 1, 1):
            call = Step(batch=1, new=new, remembered=remembered, source=SOURCE if case.cross else 0)
            found = counted(partial(serving.step, {0: case.rows(new)}))
            assert case.mechanism.cost(case.config, call).flops == found
            remembered += new
