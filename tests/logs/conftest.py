"""A byte-level tokenizer made on the spot, and chat templates with the habits of real ones."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    "{{- '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Writes a think block into the last answer only, as Qwen3 does.
THINK_DROPPING = CHATML.replace(
    "m.role + '\n' + m.content",
    "m.role + '\n' + ('<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' "
    "if loop.last and m.role == 'assistant' else '') + m.content",
)
# No special tokens at all, and an end mark only after answers.
PLAIN = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- 'ASSISTANT: ' + m.content + '</s>' }}"
    "{%- else %}{{- m.role | upper + ': ' + m.content + '\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'ASSISTANT: ' }}{%- endif %}"
)
# Asks for a think block that it then does not write (DeepSeek-R1's habit).
THINK_OPENING = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
# Refuses tool results without a call before them and two turns of one role in a row.
STRICT = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{- raise_exception('tool result without a call') }}{%- endif %}"
    "{%- if not loop.first and messages[loop.index0 - 1].role == m.role %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}" + CHATML
)


@pytest.fixture(scope="session")
def templates():
    """Templates by name."""
    return {
        "chatml": CHATML,
        "think_dropping": THINK_DROPPING,
        "plain": PLAIN,
        "strict": STRICT,
        "think_opening": THINK_OPENING,
    }


@pytest.fixture(scope="session")
def bytes_tokenizer():
    """Byte-level BPE with a few merges across letters, spaces and line ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["user assistant system: hello there\n\nthe answer is 4\n"] * 3, trainer)
    special = [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "</s>")]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=CHATML)


@pytest.fixture
def write_rows(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
