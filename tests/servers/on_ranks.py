"""A server engine on real ranks, with what tests do to its servers; functions for the rank pool."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Bucket, Completions, Sampling, generate
from megatron_dppo.rollout.servers.client import GenerateRequest, GenerateResult, ServerClient
from megatron_dppo.rollout.servers.engine import ServerEngine
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.agreement import check_agreement
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy

PROMPTS, SAMPLES, TOKENS = 24, 4, 64
BACK_S = 150.0
"""How long a server may take to come back."""


@dataclass(slots=True)
class Round:
    """What became of one round of rollouts, as its leader saw it."""

    answered: list[int] = field(default_factory=list)
    """Prompt ids, of all ranks."""
    samples: list[int] = field(default_factory=list)
    """Completions of each."""
    repeated: int = 0
    """Completions, of more than a few tokens, that are there twice."""
    versions: set[int] = field(default_factory=set)
    servers: int = 0
    """That served at its end."""
    seconds: float = 0.0
    words: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    difference: float = float("nan")
    """The greatest |log p| difference of the actor and any server that serves."""
    asked: Counter[str] = field(default_factory=Counter)
    """Prompts that each SGLang server was asked, by URL, where they were counted."""


class Rig:
    """One rank's engine, and the words that its leader said."""

    def __init__(self, settings: Sequence[str]) -> None:
        torch.set_num_threads(1)
        self.config: Config = load_config(None, settings)
        self.world = initialize(self.config.layout, seed=1, timeout_s=self.config.rollout.timeout_s)
        self.policy: PolicyParts = assemble_policy(self.config, self.world, temperature=1.0)
        if self.config.model.lora.rank:
            with torch.no_grad():
                for parameter in self.policy.actor.parameters():
                    if not parameter.any():  # they would add nothing, however they are changed
                        parameter.fill_(0.05)
        self.words: list[str] = []
        self.engine: ServerEngine = ServerEngine(self.config, self.world, self.policy.shape, self._say)
        self.on_bucket: Callable[[int], None] = lambda number: None

    def sync(self, version: int) -> None:
        self.engine.pause()
        self.engine.update_weights(self._source, version)
        self.engine.resume()

    def change(self, factor: float) -> None:
        """Weights that no server has yet."""
        with torch.no_grad():
            for parameter in self.policy.actor.parameters():
                if parameter.requires_grad:
                    parameter.mul_(factor)

    def roll_out(self, hurt: Callable[[Any], None] | None = None, servers: Sequence[int] = ()) -> Round:
        """Ask for all prompts, each rank for its share, and hurt some of the run's own servers while they generate.

        Those are held back until they have been asked, or a fast one would be done before it is hurt.
        """
        prompts = [prompt_of(i) for i in range(PROMPTS)][self.world.rank :: self.world.size]
        sampling = Sampling(SAMPLES, TOKENS, 1.0, (0,), seed=3)
        victims = [self.processes()[i] for i in servers] if self.world.leads else []

        def go_on_and_be_hurt() -> None:
            for victim in victims:
                signal_all(victim, signal.SIGCONT)
            time.sleep(0.05)
            for victim in victims:
                hurt(victim)

        timer = threading.Timer(0.4, go_on_and_be_hurt)
        began = time.monotonic()
        if victims:
            for victim in victims:
                stop_all(victim)
            timer.start()
        groups = generate(self.engine, prompts, sampling)
        if victims:
            timer.join()
        return self._round(prompts, groups, time.monotonic() - began)

    def until(self, servers: int, version: int) -> None:
        """Sync, again and again, until so many servers serve."""
        until = time.monotonic() + BACK_S
        while self.world.from_leader(lambda: len(self.engine.servers)) < servers:
            assert time.monotonic() < until, f"the servers did not come back: {self.words}"
            time.sleep(1.0)
            self.sync(version)

    def difference(self, version: int) -> float:
        """The greatest |log p| difference of the actor and any server."""
        found = check_agreement(self.policy, self.engine, [prompt_of(i) for i in range(4)], version=version)
        return found["rollout/agreement_max_diff"]

    def processes(self) -> list[Any]:
        """Of servers that the run started; on the leader."""
        pool = self.engine._pool
        return [] if pool is None else list(pool.processes)

    def _say(self, text: str) -> None:
        self.words.append(text)
        print(text, flush=True)  # for whoever reads why a test failed

    def _source(self, *, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
        for number, bucket in enumerate(self.policy.source(to=to, bucket_mib=bucket_mib)):
            self.on_bucket(number)
            yield bucket

    def _round(self, prompts: Sequence[Prompt], groups: Completions, seconds: float) -> Round:
        parts = self.world.gather(
            [
                (prompt.id, [(c.token_ids.tolist(), c.logprobs.tolist(), c.versions) for c in group])
                for prompt, group in zip(prompts, groups, strict=True)
            ]
        )
        rows = sorted((row for part in parts for row in part), key=lambda row: row[0])
        every = [completion for _, group in rows for completion in group]
        assert all(len(tokens) == len(logprobs) == sum(s.count for s in spans) for tokens, logprobs, spans in every)
        long = [tuple(logprobs) for _, logprobs, _ in every if len(logprobs) > 8]
        words, self.words[:] = list(self.words), []
        return Round(
            answered=[prompt for prompt, _ in rows],
            samples=[len(group) for _, group in rows],
            repeated=len(long) - len(set(long)),
            versions={span.version for _, _, spans in every for span in spans},
            servers=len(self.engine.servers),
            seconds=seconds,
            words=words,
            metrics=self.engine.take_events()[0],
        )


def signal_all(process: Any, number: signal.Signals) -> None:
    """To a server with all of its ranks."""
    for pid in process.pids():
        os.kill(pid, number)


def stop_all(process: Any) -> None:
    """A server that hangs: nothing answers, no connection breaks."""
    signal_all(process, signal.SIGSTOP)


def kill_main(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)


def prompt_of(number: int) -> Prompt:
    tokens = np.random.default_rng(number).integers(3, 40, size=5 + number % 7).astype(np.int32)
    return Prompt(number, tokens, f"prompt {number}", "")


def faults(rank: int, size: int, settings: Sequence[str]) -> dict[str, Round]:
    """One run of two servers that the run starts itself, and everything that can happen to them, one after the other.

    Returns:
        On the leader, the rounds by the fault that hit them.
    """
    rig = Rig(settings)
    rounds: dict[str, Round] = {}
    leads = rig.world.leads
    try:
        rig.sync(0)
        rounds["none"] = rig.roll_out()

        rounds["killed while generating"] = rig.roll_out(kill_main, [0])
        rig.change(1.01)
        rig.sync(1)
        rounds["after it was killed"] = rig.roll_out()
        rig.until(2, 1)
        rounds["once it is back"] = rig.roll_out()
        rounds["once it is back"].difference = rig.difference(1)

        rounds["hung while generating"] = rig.roll_out(stop_all, [1])
        rig.change(1.01)
        rig.sync(2)
        rig.until(2, 2)

        rig.on_bucket = lambda number: kill_main(rig.processes()[0]) if leads and number == 3 else None
        rig.change(1.01)
        once(rig, 3)
        rounds["killed in a sync"] = rig.roll_out()
        rounds["killed in a sync"].difference = rig.difference(3)
        rig.until(2, 3)

        rig.on_bucket = lambda number: stop_all(rig.processes()[1]) if leads and number == 3 else None
        rig.change(1.01)
        once(rig, 4)
        rounds["hung in a sync"] = rig.roll_out()
        rounds["hung in a sync"].difference = rig.difference(4)
        rig.until(2, 4)

        rounds["both killed"] = rig.roll_out(kill_main, [0, 1])
        rounds["both killed"].difference = rig.difference(4)
        rig.until(2, 4)
        rounds["at the end"] = rig.roll_out()
        rounds["at the end"].difference = rig.difference(4)
    finally:
        rig.engine.close()
    return rounds if leads else {}


def once(rig: Rig, version: int) -> None:
    """Sync with a fault in the first attempt, and none in the next."""
    fault = rig.on_bucket
    seen: list[int] = []

    def first(number: int) -> None:
        if number not in seen:
            seen.append(number)
            fault(number)

    rig.on_bucket = first
    rig.sync(version)
    rig.on_bucket = lambda number: None


def stop_with(rank: int, size: int, settings: Sequence[str], secret: str) -> str:
    """The error with which opening, one sync and one round end; empty if they do not."""
    os.environ[SECRET] = secret
    try:
        rig = Rig(settings)
    except UserError as error:
        return str(error)
    try:
        rig.sync(0)
        rig.roll_out()
    except UserError as error:
        return str(error)
    finally:
        rig.engine.close()
    return ""


def comes_back_old(rank: int, size: int, settings: Sequence[str], secret: str, version: str) -> list[Round]:
    """A server is told, behind the run's back, that it holds other weights, as one that was restarted would be."""
    os.environ[SECRET] = secret
    rig = Rig(settings)
    try:
        rig.sync(0)
        victim = rig.engine._serving()[0]
        before = rig.roll_out()
        rig.world.from_leader(lambda: rig.engine._http.run(_call_it(victim, version)))
        meanwhile = rig.roll_out()
        rig.until(2, 1)
        return [before, meanwhile, rig.roll_out()]
    finally:
        rig.engine.close()


def updated(rank: int, size: int, settings: Sequence[str], secret: str) -> Round:
    """One round after the second version of the weights has come."""
    os.environ[SECRET] = secret
    rig = Rig(settings)
    try:
        rig.sync(0)
        rig.change(1.01)
        rig.sync(1)
        seen = counted(rig)
        seen.difference = rig.difference(1)
        return seen
    finally:
        rig.engine.close()


def counted(rig: Rig) -> Round:
    """A round, with what each server was asked in it."""
    with _asked() as asked:
        seen = rig.roll_out()
    seen.asked = sum(rig.world.gather(asked), Counter())
    return seen


@contextmanager
def _asked() -> Iterator[Counter[str]]:
    """Count what SGLang servers are asked, by this rank and meanwhile."""
    asked: Counter[str] = Counter()
    generate = SglangClient.generate

    async def counting(api: SglangClient, ask: GenerateRequest, *, timeout_s: float) -> list[GenerateResult]:
        asked[api.url] += 1
        return await generate(api, ask, timeout_s=timeout_s)

    with mock.patch.object(SglangClient, "generate", counting):
        yield asked


async def _call_it(api: ServerClient, version: str) -> None:
    await api.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
