"""A server for SGLang's and vLLM's clients that records requests and draws random tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megatron_dppo.rollout.servers.vllm import EXTENSION, GIVEN_BY

VLLM = {
    "model_config": {
        "model": "/m",
        "dtype": "float32",
        "max_model_len": 64,
        "logprobs_mode": "processed_logprobs",
    },
    "parallel_config": {"worker_extension_cls": EXTENSION},
    "device_config": {"device": "cuda"},  # because vLLM takes no seeds on a CPU
}
ANSWERS: dict[str, dict[str, Any]] = {
    "/model_info": {"model_path": "/m"},
    "/server_info": {"tp_size": 1, "enable_deterministic_inference": True, "vllm_config": VLLM},
    "/openapi.json": {
        "paths": dict.fromkeys([*GIVEN_BY, "/begin_weight_update", "/end_weight_update"])
    },
    "/get_world_size": {"world_size": 1},
    "/collective_rpc": {"results": [None]},
}
"""Answers by path. The version of the weights is added to each."""


class RecordingServer:
    """``answer`` serves ``script.answering``; ``requests`` has the path and body of each request,
    in order.

    - Health checks are not recorded, because the clock decides when a client sends one.
    - A completion depends on its prompt and seed alone. It has random log-probabilities and ends
      with token 2.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.version = "0"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if "health" not in path and body.get("method") != "synchronize_device":
            self.requests.append(f"{path} {json.dumps(body, sort_keys=True)}")
        self.version = body.get("weight_version", body.get("new_version", self.version))
        if path == "/generate":
            each = zip(body["input_ids"], body["sampling_params"], strict=True)
            return 200, [self._answer_sglang(prompt, sampling) for prompt, sampling in each]
        if path == "/inference/v1/generate":
            samples = range(body["sampling_params"]["n"])
            return 200, {"choices": [self._answer_vllm(body, sample) for sample in samples]}
        answer = ANSWERS.get(path.partition("?")[0], {"success": True})
        # Only a router has this path.
        return 404 if path == "/workers" else 200, {**answer, "weight_version": self.version}

    def read_requests(self, folder: Path) -> list[str]:
        """Return the requests without the place of ``folder`` and the run's random id."""
        run, _, _ = self.version.rpartition("-")
        return [text.replace(str(folder), "FOLDER").replace(run, "RUN") for text in self.requests]

    def _answer_sglang(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        tokens, logprobs = draw_completion(
            prompt, sampling["sampling_seed"], sampling["max_new_tokens"]
        )
        pairs = list(zip(logprobs, tokens, strict=True))
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": self.version,
            "output_token_logprobs": pairs,
        }
        return {"output_ids": tokens, "meta_info": meta}

    def _answer_vllm(self, body: dict[str, Any], sample: int) -> dict[str, Any]:
        sampling = body["sampling_params"]
        tokens, logprobs = draw_completion(
            body["token_ids"], sampling["seed"] + sample, sampling["max_tokens"]
        )
        return {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": logprob} for logprob in logprobs]},
            "finish_reason": "stop",
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
        }


def draw_completion(prompt: list[int], seed: int, max_tokens: int) -> tuple[list[int], list[float]]:
    """Return up to ``max_tokens`` random tokens and their log-probabilities."""
    generator = random.Random(f"{prompt} {seed}")
    length = generator.randint(1, max_tokens)
    tokens = [generator.randrange(31, 60) for _ in range(length - 1)]
    tokens.append(2)
    logprobs = [-generator.random() for _ in tokens]
    return tokens, logprobs
