"""A conversation keeps its turns whatever happens to an answer."""

from __future__ import annotations

from attn_cli.commands.conversation import Conversation
from attn_schema import OutputDelta, SamplingParams


def test_ctrl_c_while_a_piece_is_written_ends_the_answer_and_keeps_what_was_said(capsys):
    class Talker:
        closed = False

        def generate(self, model, prompt, sampling):
            try:
                while True:
                    yield OutputDelta(text="a")
            finally:
                self.closed = True

    def interrupted(text):
        raise KeyboardInterrupt

    talker = Talker()
    conversation = Conversation(talker, "m", SamplingParams())
    conversation.answer("hello", interrupted)
    assert [turn.content for turn in conversation.messages] == ["hello", "a"]
    assert talker.closed
    assert capsys.readouterr().err == " [stopped]"
