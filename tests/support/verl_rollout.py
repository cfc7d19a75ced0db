"""A rollout of verl on CPUs, and an agent that calls it twice: what `verl.trainer.main_ppo` needs beside an engine.

Everything is registered where verl registers vLLM and SGLang: a replica that starts a server, the adapter in the
trainer's workers that sends it weights, and an agent loop.
"""

import asyncio
from typing import Any

import ray
import torch
from PIL import Image
from ray.actor import ActorHandle
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

CALL, TOOL = 4, 3
"""Tokens that a call generates; the token that a tool answers with."""
SPECIAL = 60
"""The first of the tokens around and within images."""


@ray.remote
class Server:
    """Samples from a model with transformers. Knows the version of its weights."""

    def __init__(self, path: str, seed: int):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from verl.utils.tokenizer import hf_processor

        torch.set_num_threads(1)
        self._images = hasattr(AutoConfig.from_pretrained(path), "vision_config")
        kind = AutoModelForImageTextToText if self._images else AutoModelForCausalLM
        self._model = kind.from_pretrained(path, dtype=torch.float32)
        self._processor = hf_processor(path, trust_remote_code=True) if self._images else None
        self._draw = torch.Generator().manual_seed(seed)
        self._global_steps: int | None = None

    async def load(self, weights: dict[str, torch.Tensor], global_steps: int) -> None:
        self._model.load_state_dict(weights)
        self._global_steps = global_steps

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], image_data: list[Any] | None = None, **_: Any
    ) -> TokenOutput:
        ids, logprobs = list(prompt_ids), []
        images = self._processor.image_processor(image_data, return_tensors="pt") if self._processor else {}
        for _ in range(CALL):
            given = torch.tensor([ids])
            types = {"mm_token_type_ids": (given == self._model.config.image_token_id).long()} if images else {}
            with torch.no_grad():  # as a decorator it would make this a plain function
                logits = self._model(given, **images, **types).logits[0, -1] / sampling_params["temperature"]
            token = SPECIAL
            while token >= SPECIAL:  # a model that is not trained would also say that there is an image
                token = int(torch.multinomial(logits.softmax(-1), 1, generator=self._draw))
            ids.append(token)
            logprobs.append(float(logits.log_softmax(-1)[token]))
        facts = {"global_steps": self._global_steps}
        return TokenOutput(token_ids=ids[-CALL:], log_probs=logprobs, stop_reason="completed", extra_fields=facts)

    async def sleep(self) -> None:
        """Nothing to free."""

    wake_up = sleep


class Replica(RolloutReplica):
    """One server for each training worker."""

    async def launch_servers(self) -> None:
        server = Server.options(name=f"cpu_server_{self.replica_rank}", num_cpus=0).remote(
            self.model_config.path, self.replica_rank
        )
        self.servers: list[ActorHandle] = [server]
        self._server_handle, self._server_address = server, f"cpu:{self.replica_rank}"


class Adapter(base.BaseRollout):
    """Sends the weights of a training worker to its server."""

    async def resume(self, tags: list[str]) -> None:
        """Nothing was freed."""

    async def release(self) -> None:
        """Nothing to free."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        gathered = {name: weight.cpu().clone() for name, weight in weights}
        server = ray.get_actor(f"cpu_server_{torch.distributed.get_rank()}")
        await asyncio.wrap_future(server.load.remote(gathered, global_steps).future())


@register("two_calls")
class TwoCalls(AgentLoopBase):
    """Call the model, drop the half of what it said, let a tool answer, call it again: two trajectories that fork.

    Both train the half that stays. The reward is the share of generated tokens that are 20 or above.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        text, images = kwargs["raw_prompt"][0]["content"], None
        prompt = self.tokenizer.encode(text)
        if self.processor is not None:
            images = [Image.new("RGB", (8, 4), (20 * prompt[0], 0, 99))]  # each prompt has its own
            seen = f"<|vision_start|> <|image_pad|> <|vision_end|> {text}"
            prompt = self.processor(text=[seen], images=images)["input_ids"][0]

        async def call(context: list[int]) -> TokenOutput:
            return await self.server_manager.generate(
                request_id=kwargs["uid"],
                prompt_ids=prompt + context,
                sampling_params=sampling_params,
                image_data=images,
            )

        first = await call([])
        context = [*first.token_ids[: CALL // 2], TOOL]
        second = await call(context)
        generated = [*first.token_ids, *second.token_ids]
        reward = sum(token >= 20 for token in generated) / len(generated)
        return [
            AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=[*context, *output.token_ids],
                response_mask=[1] * len(context[:-1]) + [0] * len(context[-1:]) + [1] * CALL,
                response_logprobs=[
                    *first.log_probs[: len(context[:-1])],
                    *[0.0] * len(context[-1:]),
                    *output.log_probs,
                ],
                reward_score=reward,
                multi_modal_data={"images": images} if images else {},
                num_turns=2,
                metrics={},
                extra_fields=output.extra_fields | {"reward_extra_info": {}},
            )
            for context, output in (([], first), (context, second))
        ]


RolloutReplicaRegistry.register("cpu", lambda: Replica)
base._ROLLOUT_REGISTRY["cpu", "async"] = f"{__name__}.Adapter"
