"""Train the tokenizer of the built-in random models on the shipped transcripts.

    python -m examples.countdown.train_tokenizer

A byte-level BPE of `VOCABULARY` tokens: any text round-trips. It is trained on the training transcripts
and, so that other text is not split into letters, on the LICENSE file and a list of common words. The same inputs
give the same vocabulary. The chat template beside the tokenizer is written by hand; this program reads it.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "src" / "treetrain" / "models" / "presets"
VOCABULARY = 2048
MAX_POSITIONS = 16_384
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_TAGS = ("<tool_call>", "</tool_call>")  # one token each; not special, so that decoding keeps them

# Words, digits and punctuation, each with the space before it; newlines go with the punctuation before them.
# No token glues two digits together.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

COMMON_WORDS = """
a about above add after again all also always an and another answer any are as ask at away back be because
been before begin being best better between both but by call can change check choose close come common
compare correct could count day did different do does done down each early easy either else end enough error
even ever every example explain fact fail false far few file final find first follow for found four from
full get give go good great had half hand has have he help her here high him his hold hope how however if
important in inside instead into is it its just keep kind know large last later learn least left less let
light like likely line list little long look lost low made main make many may maybe me mean might more most
move much must my name near need never new next no not nothing now number of off often old on once one only
open or order other our out over own part path people perhaps place plan point possible problem question
quick quite rather reach read ready real reason remember result return right run said same say search second
see seem set several she short should show side simple since small so some something soon start state step
still stop such sure system take task tell test text than that the their them then there these they thing
think third this those three through time to together too tool total train tree true try turn two under
until up us use user value very want was way we well went were what when where which while who whole why
will with within without word work world would write wrong year yes yet you your
"""


def texts(transcripts: Path) -> list[str]:
    """Training text: the rendered transcripts, the licence, common words, ASCII."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (PRESETS / "chat_template.jinja").read_text()
    rendered = []
    with gzip.open(transcripts, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            text, _ = render_jinja_template([row["messages"]], tools=row["tools"], chat_template=template)
            rendered.extend(text)
    ascii_coverage = " ".join(chr(code) for code in range(33, 127))
    return [*rendered, (ROOT / "LICENSE").read_text(), COMMON_WORDS, ascii_coverage]


def train(transcripts: Path) -> "Tokenizer":
    """Train and return the tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, START, END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TOOL_TAGS),
        min_frequency=1,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts(transcripts), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TOOL_TAGS])
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY:
        raise ValueError(f"{size} tokens were learnt, {VOCABULARY} wanted: the texts hold too few words")
    return tokenizer


def write(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    train(Path(__file__).parent / "train.jsonl.gz").save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Command line: rewrite the tokenizer of the presets."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of the built-in models.")
    parser.add_argument("--out", type=Path, default=PRESETS, help="folder of the tokenizer files")
    folder = parser.parse_args().out
    write(folder)
    print(f"{folder / 'tokenizer.json'}: {(folder / 'tokenizer.json').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
