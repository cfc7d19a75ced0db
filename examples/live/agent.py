"""An agent that plans, a sub-agent that calculates, and the histories of both as rows of a training.

    question -> <ask>12 * 7</ask> -> the sub-agent, in a history of its own: a tool call, the calculator, the result
             -> the history is copied: from here on every branch is sampled by itself
             -> a note, which is all that is left of the history (compaction)
             -> <ask>84 - 5</ask> -> a sub-agent -> Answer: 79

Text becomes tokens once, before the sampler reads it. What the sampler writes is kept as its token ids and their
log-probabilities: no row is made by tokenising text again, and a row holds what the sampler saw and nothing else.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import treetrain as tt
from examples.calculator.problems import Problem, calculate, correct

PLAN = (
    "You solve problems. A helper calculates for you: write <ask>12 * 7</ask> and you are told the result. Ask for one "
    "calculation at a time. When you know the answer, write it after the word Answer, and nothing else."
)
HELP = (
    "You have a calculator. When you are asked for a result, write <tool_call>12 * 7</tool_call>. When the calculator "
    "has replied, write the result, and nothing else."
)
COMPACT = "Your history is dropped now. Write a note of what you know."
ASKS = 2
"""Questions to the sub-agent after a note, at the most."""


class Turn(NamedTuple):
    """A turn as it was sampled: token ids, the end of the turn included, and the log-probability of each in nats."""

    ids: list[int]
    logprobs: list[float]


Sampler = Callable[[list[list[int]]], list[Turn]]
"""Samples a turn for each of a batch of histories, given as token ids."""


@dataclass(slots=True)
class History:
    """What a model has read and written: token ids, [L], their log-probabilities, and 1 for each that it wrote."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append what the model is told, or, with log-probabilities, what it wrote."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.written += [float(logprobs is not None)] * len(ids)

    def copy(self) -> "History":
        """The same history, to be continued in another way."""
        return History(self.ids[:], self.logprobs[:], self.written[:])


@dataclass(slots=True)
class Episode:
    """One way to an answer: the histories that led to it, those that were dropped included."""

    histories: list[History]
    reply: str
    """The agent's last turn."""

    def rows(self, problem: Problem, number: int) -> list[tt.Trajectory]:
        """A row for every history, all with the reward of the answer."""
        return [
            tt.Trajectory(
                history.ids,
                loss_weights=history.written,
                rollout_logprobs=history.logprobs,
                reward=correct(self.reply, problem.answer),
                group=problem.question,  # answers to one problem are compared with each other
                episode=number,  # rows of one episode count once in the comparison
            )
            for history in self.histories
        ]


class Agents:
    """The agent and its sub-agent, on one sampler."""

    def __init__(self, tokenizer: Any, sample: Callable[[list[int]], Awaitable[Turn]]) -> None:
        self.tokenizer, self.sample = tokenizer, sample

    async def solve(self, question: str, branches: int) -> list[Episode]:
        """Work on a problem up to the first result once, and from there in several branches."""
        agent = self._begin(PLAN, question)
        asked = _within("ask", first := await self._write(agent))
        if asked is None:
            return [Episode([agent], first)]
        result, helper = await self._help(asked)
        self._tell(agent, ("tool", result), ("user", COMPACT))
        return await asyncio.gather(*(self._finish(question, agent.copy(), helper) for _ in range(branches)))

    async def _finish(self, question: str, dropped: History, helper: History) -> Episode:
        """Write a note, drop the history, and work on from the note to the answer."""
        note = await self._write(dropped)
        agent = self._begin(PLAN, f"{question}\nYour note: {note}")
        histories = [helper, dropped, agent]
        reply = await self._write(agent)
        for _ in range(ASKS):
            if (asked := _within("ask", reply)) is None:
                break
            result, helper = await self._help(asked)
            histories.append(helper)
            self._tell(agent, ("tool", result))
            reply = await self._write(agent)
        return Episode(histories, reply)

    async def _help(self, asked: str) -> tuple[str, History]:
        """The sub-agent's reply, and its history."""
        helper = self._begin(HELP, asked)
        reply = await self._write(helper)
        if (called := _within("tool_call", reply)) is not None:
            self._tell(helper, ("tool", calculate(called)))
            reply = await self._write(helper)
        return reply, helper

    def _begin(self, system: str, user: str) -> History:
        history = History()
        self._tell(history, ("system", system), ("user", user))
        return history

    def _tell(self, history: History, *messages: tuple[str, str]) -> None:
        """Append messages, and the header of the turn that the model writes next."""
        text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in messages)
        between = "\n" if history.ids else ""  # after the end of a turn
        history.add(self.tokenizer(f"{between}{text}<|im_start|>assistant\n", add_special_tokens=False)["input_ids"])

    async def _write(self, history: History) -> str:
        """Let the model write a turn; its text, empty if the turn was cut off before its end."""
        turn = await self.sample(history.ids)
        history.add(*turn)
        ended = turn.ids[-1] == self.tokenizer.eos_token_id
        return self.tokenizer.decode(turn.ids, skip_special_tokens=True) if ended else ""


def _within(tag: str, reply: str) -> str | None:
    """The text between the first pair of tags; None if there is none."""
    match = re.search(f"<{tag}>(.*?)</{tag}>", reply, re.DOTALL)
    return None if match is None else match[1]


class Batches:
    """Makes one batch of the histories of all agents that wait for a turn."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.waiting: list[tuple[list[int], asyncio.Future[Turn]]] = []
        self.running: asyncio.Task[None] | None = None

    async def __call__(self, ids: list[int]) -> Turn:
        """The turn that continues these ids."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append((ids, turn))
        if len(self.waiting) == 1:
            self.running = asyncio.create_task(self._run())
        return await turn

    async def _run(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)  # agents that go on first, and their branches, join the batch
        batch, self.waiting = self.waiting, []
        try:
            turns = self.sampler([ids for ids, _ in batch])
            if len(turns) != len(batch):
                raise ValueError(f"{len(turns)} turns for {len(batch)} histories")
        except Exception as error:  # an agent whose turn never came would wait for ever
            for _, waits in batch:
                failure = RuntimeError(f"the sampler failed: {error!r}")
                failure.__cause__ = error
                waits.set_exception(failure)  # no StopIteration, which a future does not take
            return
        for (_, waits), turn in zip(batch, turns, strict=True):
            waits.set_result(turn)


def run_all(solving: Iterable[Coroutine[Any, Any, list[Episode]]]) -> list[list[Episode]]:
    """Run agents side by side; the episodes of each."""

    async def gather() -> list[list[Episode]]:
        return await asyncio.gather(*solving)

    return asyncio.run(gather())


def demonstration(tokenizer: Any, problem: Problem) -> Episode:
    """The episode of agents that solve a problem: what they write is given, and everything else is as in play."""
    turns = []
    results = [calculate(expression) for expression in problem.calculations]
    for number, (expression, result) in enumerate(zip(problem.calculations, results)):
        turns += [f"<ask>{expression}</ask>", f"<tool_call>{expression}</tool_call>", result]
        turns += [f"{expression} = {result}"] * (number == 0)  # the note
    turns = iter([*turns, f"Answer: {problem.answer}"])

    async def write(_: list[int]) -> Turn:
        ids = tokenizer(next(turns) + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        return Turn(ids, [0.0] * len(ids))

    ((episode,),) = run_all([Agents(tokenizer, write).solve(problem.question, branches=1)])
    return episode
