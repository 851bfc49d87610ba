"""A server engine on real ranks, with faults of its servers; functions for the rank pool."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.engine import Bucket, Sampling
from megatron_dppo.rollout.servers.engine import ServerEngine
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.agreement import check_agreement
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy
from tests.rollout.local import generate

PROMPTS, SAMPLES, TOKENS = 24, 4, 64
LONG = 256
"""Tokens of a completion that an update finds unfinished."""
BACK_S = 150.0
"""Seconds that a server may take to come back."""


@dataclass(slots=True)
class Round:
    """One round of rollouts, as rank 0 saw it."""

    answered: list[int]
    """Prompt ids, of all ranks."""
    samples: list[int]
    """Completions of each."""
    versions: set[int]
    servers: int
    """That served at its end."""
    metrics: dict[str, float]
    difference: float = float("nan")
    """Greatest |log p| difference of the actor and any server."""


class Rig:
    """One rank's engine, and the words that its rank 0 said."""

    def __init__(self, settings: Sequence[str], secret: str = "") -> None:
        if secret:
            os.environ[SECRET] = secret
        torch.set_num_threads(1)
        self.config = load_config(None, settings)
        self.world = initialize(self.config.layout, seed=1, timeout_s=self.config.rollout.timeout_s)
        self.policy: PolicyParts = assemble_policy(self.config, self.world, temperature=1.0)
        if self.config.model.lora.rank:
            with torch.no_grad():
                for parameter in self.policy.actor.parameters():
                    if not parameter.any():  # zeros would stay zeros, however they are scaled
                        parameter.fill_(0.05)
        self.words: list[str] = []
        self.engine = ServerEngine(self.config, self.world, self.policy.shape, self._say)
        self.on_bucket: Callable[[int], None] = lambda number: None

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def sync(self, version: int) -> None:
        self.engine.pause()
        self.engine.update_weights(self._source, version)
        self.engine.resume()

    def change(self, factor: float = 1.01) -> None:
        """Change the actor's weights."""
        with torch.no_grad():
            for parameter in self.policy.actor.parameters():
                if parameter.requires_grad:
                    parameter.mul_(factor)

    def roll_out(self, hurt: Callable[[Any], None] | None = None, *servers: int) -> Round:
        """Request all prompts, each rank its share, and hurt some of the run's own servers while
        they generate.

        Victims are stopped until they have been asked, or a fast one would finish before it is
        hurt.
        """
        prompts = [prompt_of(i) for i in range(PROMPTS)][self.world.rank :: self.world.size]
        victims = [self.processes()[i] for i in servers] if self.world.is_rank0 else []

        def resume_and_hurt() -> None:
            for victim in victims:
                signal_all(victim, signal.SIGCONT)
            time.sleep(0.05)
            for victim in victims:
                hurt(victim)

        timer = threading.Timer(0.4, resume_and_hurt)
        for victim in victims:
            stop_all(victim)
        timer.start()
        groups = generate(self.engine, prompts, Sampling(SAMPLES, TOKENS, 1.0, (0,), seed=3))
        timer.join()
        parts = self.world.gather(list(zip([prompt.id for prompt in prompts], groups, strict=True)))
        found = dict(sorted(pair for part in parts for pair in part))
        completions = [completion for group in found.values() for completion in group]
        return Round(
            answered=list(found),
            samples=[len(group) for group in found.values()],
            versions={version for c in completions for version in c.versions.tolist()},
            servers=len(self.engine.servers),
            metrics=self.engine.take_events()[0],
        )

    def wait_for_servers(self, count: int, version: int) -> None:
        """Sync, again and again, until so many servers serve."""
        until = time.monotonic() + BACK_S
        while self.world.broadcast(lambda: len(self.engine.servers)) < count:
            assert time.monotonic() < until, f"the servers did not come back: {self.words}"
            time.sleep(1.0)
            self.sync(version)

    def difference(self, version: int) -> float:
        found = check_agreement(
            self.policy, self.engine, [prompt_of(i) for i in range(4)], version=version
        )
        return found["rollout/agreement_max_diff"]

    def processes(self) -> list[Any]:
        """Return the run's own servers; on rank 0."""
        return list(self.engine._pool.processes)

    def _say(self, text: str) -> None:
        self.words.append(text)
        print(text, flush=True)  # for the log of a failed test

    def _source(self, *, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
        for number, bucket in enumerate(self.policy.source(to=to, bucket_mib=bucket_mib)):
            self.on_bucket(number)
            yield bucket


def signal_all(process: Any, number: signal.Signals) -> None:
    """Signal a server with all of its ranks."""
    for pid in process.list_pids():
        os.kill(pid, number)


def stop_all(process: Any) -> None:
    """Hang a server: nothing answers, no connection breaks."""
    signal_all(process, signal.SIGSTOP)


def kill_main(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)


def prompt_of(number: int) -> Prompt:
    tokens = np.random.default_rng(number).integers(3, 40, size=5 + number % 7).astype(np.int32)
    return Prompt(number, tokens, f"prompt {number}", "")


def faults(rank: int, size: int, settings: Sequence[str]) -> dict[str, Round]:
    """Run two servers of the run's own through one fault after the other.

    Returns:
        On rank 0, the rounds by the fault that hit them.
    """
    rounds: dict[str, Round] = {}

    def note(
        name: str, version: int, hurt: Callable[[Any], None] | None = None, *servers: int
    ) -> None:
        rounds[name] = rig.roll_out(hurt, *servers)
        if rounds[name].servers == 2 or hurt is None:
            rounds[name].difference = rig.difference(version)

    def kill_once(number: int) -> None:
        if rig.world.is_rank0 and number == 3:
            kill_main(rig.processes()[0])
            rig.on_bucket = lambda number: None

    with Rig(settings) as rig:
        rig.sync(0)
        note("none", 0)
        note("killed while generating", 0, kill_main, 0)
        rig.change()
        rig.sync(1)
        note("after it was killed", 1)
        rig.wait_for_servers(2, 1)
        note("once it is back", 1)
        note("hung while generating", 1, stop_all, 1)
        rig.change()
        rig.wait_for_servers(2, 2)
        rig.change()
        rig.on_bucket = kill_once
        rig.sync(3)
        note("killed in a sync", 3)
        rig.wait_for_servers(2, 3)
        note("both killed", 3, kill_main, 0, 1)
        rig.wait_for_servers(2, 3)
        note("at the end", 3)
    return rounds if rig.world.is_rank0 else {}


def stop_with(rank: int, size: int, settings: Sequence[str], secret: str) -> str:
    """Return the error with which opening, one sync and one round end; empty without any."""
    try:
        with Rig(settings, secret) as rig:
            rig.sync(0)
            rig.roll_out()
    except UserError as error:
        return str(error)
    return ""


def colocated(
    rank: int, size: int, settings: Sequence[str]
) -> tuple[list[Round], list[list[list[str]]]]:
    """Take three steps with servers that give their memory back between them. One is killed in the
    second.

    Returns:
        On rank 0: the rounds, and each server's requests over its memory and weights before each.
    """
    names = (
        "release_memory",
        "resume_weights",
        "begin_update",
        "end_update",
        "resume_kv_cache",
        "resume",
    )
    calls = defaultdict[str, list[str]](list)

    def noting(name: str) -> Any:
        method = getattr(SglangClient, name)

        async def call(api: SglangClient, *arguments: Any) -> Any:
            calls[api.url].append(name)
            return await method(api, *arguments)

        return call

    rounds, requests = [], []
    with (
        Rig(settings) as rig,
        mock.patch.multiple(SglangClient, **{name: noting(name) for name in names}),
    ):
        for version in range(3):
            rig.engine.pause()
            rig.change()
            rig.sync(version)
            requests.append(list(calls.values()))
            rounds.append(rig.roll_out(*([kill_main, 0] if version == 1 else [])))
            rounds[-1].difference = rig.difference(version)
            calls.clear()
    return (rounds, requests) if rig.world.is_rank0 else ([], [])


def in_flight(rank: int, size: int, settings: Sequence[str], secret: str) -> dict[str, Any]:
    """Update the weights under unfinished rollouts; up to five times, since a server may finish
    before an update.

    Returns:
        On rank 0: the count of samples of each prompt; the versions of each completion's tokens, 0
        before the update and 1 after it; the mean |log p| difference to the actor, with the weights
        after the update, of tokens whose version is 1, NaN without any.
    """
    with Rig(settings, secret) as rig:
        rig.sync(0)
        for old in range(5):
            found = _update_in_flight(rig, old)
            if (0, 1) in found["versions"]:
                break
    return found


def _update_in_flight(rig: Rig, old: int) -> dict[str, Any]:
    prompts = [prompt_of(i) for i in range(PROMPTS)][rig.world.rank :: rig.world.size]
    rig.change(1.03)
    half, sampling = len(prompts) // 2, Sampling(SAMPLES, LONG, 1.0, (), seed=3)
    pending = [rig.engine.begin(prompts[:half], sampling)]
    rig.world.barrier("beginning")
    # Once a prompt that was asked later has some tokens, the others have some, however busy the
    # machine is.
    later = [prompt_of(PROMPTS)], Sampling(1, LONG // 8, 1.0, (), seed=3)
    rig.world.broadcast(lambda: rig.engine.begin(*later).wait(60.0))
    pending.append(rig.engine.begin(prompts[half:], sampling))  # arrives during the pause
    rig.sync(old + 1)
    groups = [group for batch in pending for group in rig.engine.finish(batch)]
    versions = [tuple(np.unique(c.versions - old).tolist()) for group in groups for c in group]
    mixed = [
        (p, c)
        for p, group in zip(prompts, groups, strict=True)
        for c in group
        if len(np.unique(c.versions)) == 2
    ]
    parts = rig.world.gather(([len(group) for group in groups], versions, mixed[:4]))
    return {
        "samples": [count for part in parts for count in part[0]],
        "versions": [each for part in parts for each in part[1]],
        "difference": _mean_difference(rig, [each for part in parts for each in part[2]]),
    }


def _mean_difference(rig: Rig, mixed: Sequence[tuple[Prompt, Completion]]) -> float:
    """Return the mean |log p| difference of actor and engine, of tokens after the first version's.
    Collective."""
    if not mixed:
        return float("nan")
    samples = [
        TrainingSample(p.token_ids, c.token_ids, c.logprobs, c.loss_mask, 0.0, 0.0, version=0)
        for p, c in mixed
    ]
    lengths = [len(p.token_ids) + len(c.token_ids) for p, c in mixed]
    packs = [
        build_pack([s], capacity=n, pad_id=0, align=1)
        for s, n in zip(samples, lengths, strict=True)
    ]
    scores = rig.policy.actor.log_probabilities(packs)
    differences = [
        np.abs(score - c.logprobs)[c.versions > c.versions[0]]
        for (_, c), score in zip(mixed, scores, strict=True)
    ]
    return float(np.concatenate(differences).mean())
