"""Rows of conversations and preferences as public data sets have them, which all say the same."""

from __future__ import annotations

import json

HI, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("assistant", "no"))
)
SYSTEM = {"role": "system", "content": "be"}

CHATS = {
    "messages": {"messages": [HI, YES]},
    "a further column": {"messages": [HI, YES], "id": 3},
    "a spare text": {"messages": [HI, YES], "text": "<u>hi<a>yes"},
    "parts": {"messages": [HI | {"content": [{"type": "text", "text": "hi"}]}, YES]},
    "texts": {"prompt": "hi", "completion": "yes"},
    "messages in two columns": {"prompt": [HI], "completion": [YES]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    "Alpaca": {"instruction": "hi", "input": "", "output": "yes"},
    "Dolly": {"instruction": "hi", "context": "", "response": "yes"},
    "GSM8K": {"question": "hi", "answer": "yes"},
    "Nemotron": {"input": [HI], "output": "yes"},
    "UltraChat": {"data": ["hi", "yes"], "id": "0"},
    "weights of every turn": {"messages": [HI | {"weight": 0.0}, YES | {"weight": 1.0}]},
    "Capybara": {"conversation": [{"input": "hi", "output": "yes"}]},
    "MOSS": {"conversation": [{"human": "hi", "assistant": "yes"}]},
    "WildChat": {"conversation": [HI | {"toxic": False, "header": {"a": "b"}}, YES | {"language": "English"}]},
    "speakers": {"dialogue": [{"speaker": "User", "text": "hi"}, {"speaker": "Assistant", "text": "yes"}]},
    "Bing": {"conversations": [{"from": "user", "value": "hi"}, {"from": "bing", "value": "yes"}]},
    "messages as JSON": {"messages": json.dumps([HI, YES])},
    "parts of Responses": {
        "messages": [
            HI | {"content": [{"type": "input_text", "text": "hi"}]},
            YES | {"content": [{"type": "output_text", "text": "yes"}]},
        ]
    },
    "OASST, a tree": {
        "message_tree_id": "a",
        "prompt": {
            "role": "prompter",
            "text": "hi",
            "replies": [
                {"role": "assistant", "text": "no", "rank": 1},
                {"role": "assistant", "text": "yes", "rank": 0},
                {"role": "assistant", "text": "well", "rank": None, "replies": []},
            ],
        },
    },
    "ChatML": {"text": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"},
    "Guanaco": {"text": "### Human: hi### Assistant: yes"},
    "Llama 2": {"text": "<s>[INST] hi [/INST] yes </s>"},
    "Glaive": {"system": "", "chat": "USER: hi\n\n\nASSISTANT: yes <|endoftext|>\n\n\n"},
    "capital letters": {"Question": "hi", "Response": "yes"},
    "OpenMathInstruct": {"problem": "hi", "generated_solution": "yes"},
    "CAMEL": {"message_1": "hi", "message_2": "yes"},
    "Firefly": {"input": "hi", "target": "yes"},
    "a list of one answer": {"question": "hi", "answer": ["yes"]},
    "nulls": {"messages": [HI | {"tool_calls": None, "name": None}, YES], "tools": None},
}


ULTRA = {
    "prompt": "hi",
    "prompt_id": "x",
    "chosen": [HI, YES],
    "rejected": [HI, NO],
    "messages": [HI, YES],
    "score_chosen": 8.0,
    "score_rejected": 2.0,
}
PREFERENCES = {
    "messages": {"prompt": [HI], "chosen": [YES], "rejected": [NO]},
    "texts": {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    "UltraFeedback": ULTRA,
    "the prompt within": {"chosen": [HI, YES], "rejected": [HI, NO]},
    "HH": {name: f"\n\nHuman: hi\n\nAssistant: {answer}" for name, answer in (("chosen", "yes"), ("rejected", "no"))},
    "OpenAI": {"input": {"messages": [HI]}, "preferred_output": [YES], "non_preferred_output": [NO]},
    "LLaMA-Factory": {"conversations": [{"from": "human", "value": "hi"}], "chosen": YES, "rejected": NO},
    "rm-static": {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": "yes", "rejected": "no"},
    "Argilla": {"instruction": "hi", "chosen_response": "yes", "rejected_response": "no"},
    "StackExchange": {"question": "hi", "response_j": "yes", "response_k": "no"},
    "both columns of a prompt within": {"prompt": "hi", "question": "hi", "chosen": [HI, YES], "rejected": [HI, NO]},
    "UltraInteract": {"trajectory": [{"from": "user", "value": "hi"}], "chosen": "yes", "rejected": "no"},
    "ms-swift": {"messages": [HI, YES], "rejected_response": "no"},
    "ms-swift, messages": {"messages": [HI, YES], "rejected_messages": [HI, NO]},
    "Step-DPO": {"prompt": "hi", "initial_reason_steps": "", "chosen": "yes", "rejected": "no"},
    "UltraFeedback, raw": {
        "instruction": "hi",
        "completions": [{"response": "no", "overall_score": 2.0}, {"response": "yes", "overall_score": 8}],
    },
    "StackExchange, scores": {
        "question": "hi", "answers": [{"text": "yes", "pm_score": 3}, {"text": "no", "pm_score": 0}],
    },
    "distilabel": {"instruction": "hi", "generations": ["no", "yes"], "ratings": [1.0, 5.0]},
    "AlpacaFarm": {"instruction": "hi", "input": "", "output_1": "no", "output_2": "yes", "preference": 2},
    "SHP": {"history": "hi", "human_ref_A": "yes", "human_ref_B": "no", "labels": 1},
    "SHP, the second": {"history": "hi", "human_ref_A": "no", "human_ref_B": "yes", "labels": 0},
    "PKU-SafeRLHF": {"prompt": "hi", "response_0": "no", "response_1": "yes", "better_response_id": 1},
    "HelpSteer2": {"prompt": "hi", "response_1": "yes", "response_2": "no", "preference_strength": -2},
    "HelpSteer3": {"context": [HI], "response1": "no", "response2": "yes", "overall_preference": 1},
    "WebGPT": {
        "question": {"id": "1", "full_text": "hi"}, "answer_0": "no", "answer_1": "yes", "score_0": -1, "score_1": 0.5,
    },
    "Nectar": {
        "prompt": "\n\nHuman: hi\n\nAssistant: ",
        "answers": [{"answer": "well", "rank": 2.0}, {"answer": "no", "rank": 3.0}, {"answer": "yes", "rank": 1.0}],
    },
    "arena, 55k": {
        "prompt": '["hi"]', "response_a": '["yes"]', "response_b": '["no"]', "winner_model_a": 1, "winner_model_b": 0,
        "winner_tie": 0,
    },
    "arena": {"conversation_a": [HI, NO], "conversation_b": [HI, YES], "winner": "model_b", "turn": 1},
    "MT-bench, the first turn": {
        "conversation_a": [HI, YES, HI, NO], "conversation_b": [HI, NO, HI, YES], "winner": "model_a", "turn": 1,
    },
}  # fmt: skip
