"""vLLM in this process: samples turns, and takes the trainer's weights.

The model is loaded in bfloat16, by vLLM's own kernels. So its log-probabilities are not those of the trainer.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from examples.live.agent import Turn

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, so that weights are handed over as tensors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are the trainer's, too
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VLLM:
    """A model of a folder in vLLM, which samples at temperature 1 from the whole distribution.

    Args:
        turn_tokens: tokens of a turn, at the most.
        seed: turns are the same for equal seeds, weights and requests.
    """

    def __init__(self, folder: str | Path, *, turn_tokens: int = 20, seed: int = 0) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(folder),
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=64,
            enforce_eager=True,  # nothing is compiled
            seed=seed,
            disable_log_stats=True,
        )
        self.turn_tokens, self.next_seed = turn_tokens, seed * 1_000_000

    def __call__(self, histories: list[list[int]]) -> list[Turn]:
        """A turn for each history, in one batch."""
        from vllm import SamplingParams

        self.next_seed += len(histories)
        options = [
            SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=self.turn_tokens, logprobs=0, seed=seed)
            for seed in range(self.next_seed - len(histories), self.next_seed)
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in histories], options, use_tqdm=False)
        turns = [output.outputs[0] for output in outputs]
        return [
            Turn(list(turn.token_ids), [found[token].logprob for token, found in zip(turn.token_ids, turn.logprobs)])
            for turn in turns
        ]

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the trainer's weights, by their names in the checkpoint; what was cached for the old ones is dropped."""
        rounded = ((name, weight.detach().to(torch.bfloat16)) for name, weight in weights.items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": rounded})
        # A head that is tied to the embeddings is packed for CPUs at the start alone, and would keep the old weights.
        self.llm.apply_model(lambda model: model.lm_head.quant_method.process_weights_after_loading(model.lm_head))
        self.llm.reset_prefix_cache()
