"""Requests to a stock SGLang server.

Properties of SGLang:

- Refusals have status 200 or 400, depending on the route: ``success`` is always checked.
- An update must lie between begin and end, if the server has routes for begin and end.
- A tensor of a wrong shape kills the server, and so does a token id outside the vocabulary.
- With deterministic inference all samples of a request have the same seed and are equal. Each
  sample is then a separate request.
- ``ignore_eos`` would disable every stop token. Therefore the model's end-of-sequence tokens stop a
  completion even if not requested.
- Until its end, a request keeps the adapter that had the requested name at admission, and a paused
  request is admitted later. Therefore the adapter is replaced, under the same name, while no
  request is running. Unloading waits for requests with the adapter.
"""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dppo.config import Config, LoraConfig
from megatron_dppo.rl.numbers import as_logprobs
from megatron_dppo.rollout.servers.client import (
    ADAPTER,
    INCOMPLETE,
    TOP_LOGPROBS,
    GenerateResult,
    InFlight,
    Manifest,
    ServerClient,
    ServerInfo,
    WeightGroup,
    compute_entropy_bounds,
)
from megatron_dppo.rollout.servers.http import ServerError, format_url_host
from megatron_dppo.rollout.servers.launch import EngineSpec

if TYPE_CHECKING:
    import torch

    from megatron_dppo.rollout.engine import Sampling

PAUSES: Mapping[InFlight, str] = {"retract": "retract", "keep": "in_place", "abort": "abort"}


class SglangClient(ServerClient):
    """See :class:`ServerClient`."""

    _known_routes: frozenset[str] | None = None
    _known_deterministic: bool | None = None

    async def get_info(self) -> ServerInfo:
        model = await self.get("/model_info")
        server = await self.get("/server_info")
        self._known_routes = await self.get_routes()
        self._known_deterministic = bool(server.get("enable_deterministic_inference"))
        stages = int(server.get("pp_size", 1))
        self.ranks = int(server["tp_size"]) * stages
        return ServerInfo(
            model=model["model_path"],
            architecture=(model.get("architectures") or [None])[0],
            stages=stages,
            dtype=_parse_dtype(server.get("dtype")),
            max_tokens=server.get("context_length"),
            routing=bool(server.get("enable_return_routed_experts")),
            sampling_mask="sampling_mask_max_tokens" in server,
            lora_rank=(server.get("max_lora_rank") or 0) if server.get("enable_lora") else 0,
            lora_targets=frozenset(server.get("lora_target_modules") or ()),
        )

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        **query: str,
    ) -> Any:
        """Send a request, with the adapter's name for ``/generate``."""
        # Functions written for slime call this method without an adapter.
        if self.adapted and path == "/generate":
            body = {**body, "lora_path": ADAPTER}
        return await super().post(path, body, timeout_s=timeout_s, **query)

    async def health(self, timeout_s: float) -> None:
        await self.get("/health_generate", timeout_s=timeout_s)

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        timeout_s: float,
    ) -> list[GenerateResult]:
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            **sampling.truncation,
        }
        body: dict[str, Any] = {"return_logprob": True}
        if sampling.routing is not None:
            body["return_routed_experts"] = True
        if sampling.sampling_mask:
            body["return_sampling_mask"] = True
        if sampling.needs_entropies:
            body["top_logprobs_num"] = TOP_LOGPROBS
        separate: list[dict[str, Any]] = []
        if await self._is_deterministic():
            # A shared seed would repeat the same sample.
            seeds = range(sampling.seed, sampling.seed + sampling.samples)
            separate = [parameters | {"sampling_seed": seed} for seed in seeds]
        elif sampling.sampling_mask:
            # For n > 1, SGLang 0.5.23 reports no kept ids.
            separate = [parameters] * sampling.samples
        if separate:
            body["input_ids"] = [list(token_ids)] * sampling.samples
            body["sampling_params"] = separate
        else:
            body["input_ids"] = list(token_ids)
            body["sampling_params"] = parameters | {"n": sampling.samples}
        answers = await self.post("/generate", body, timeout_s=timeout_s)
        # A single sample comes without a list.
        answers = answers if isinstance(answers, list) else [answers]
        return [self._parse_result(answer, len(token_ids), sampling) for answer in answers]

    async def pause(self, in_flight: InFlight) -> None:
        await self.post("/pause_generation", {"mode": PAUSES[in_flight]})

    async def resume(self) -> None:
        await self.post("/continue_generation", {})

    async def flush(self) -> None:
        await self.post("/flush_cache", {})

    async def begin_update(self) -> None:
        if await self._has_route("/begin_weight_update"):
            await self._post_and_check("/begin_weight_update", {})
        await self._set_version(INCOMPLETE)

    async def end_update(self, version: str) -> None:
        if await self._has_route("/end_weight_update"):
            await self._post_and_check("/end_weight_update", {})
        # The last bucket has usually set the version; an adapter has not.
        if await self.get_version() != version:
            await self._set_version(version)

    async def abort_update(self) -> None:
        await self._end_if_any("/end_weight_update", {})

    async def join(self, group: WeightGroup) -> None:
        body = {
            "master_address": format_url_host(group.host),
            "master_port": group.port,
            "rank_offset": group.offset,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post_and_check("/init_weights_update_group", body)

    async def leave(self, group: str) -> None:
        await self._end_if_any("/destroy_weights_update_group", {"group_name": group})

    async def update_from_distributed(
        self,
        manifest: Manifest,
        group: str,
        version: str | None,
    ) -> None:
        body = asdict(manifest) | {"group_name": group, "load_format": "flattened_bucket"}
        await self._post_and_check(
            "/update_weights_from_distributed", body | _build_update_fields(version)
        )

    async def update_from_disk(self, folder: Path, version: str) -> None:
        body = {"model_path": str(folder), "load_format": "auto"}
        await self._post_and_check(
            "/update_weights_from_disk", body | _build_update_fields(version)
        )

    async def load_adapter(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        await self._end_if_any("/unload_lora_adapter", {"lora_name": ADAPTER})
        # By value, because the file descriptors of SGLang's own way work on a single machine only.
        every = base64.b64encode(pickle.dumps(dict(tensors))).decode()
        body = {
            "lora_name": ADAPTER,
            "config_dict": dict(config),
            "serialized_named_tensors": [every] * self.ranks,
        }
        await self._post_and_check("/load_lora_adapter_from_tensors", body)

    async def get_version(self) -> str:
        return str((await self.get("/model_info"))["weight_version"])

    async def get_checksums(self) -> dict[str, str]:
        if not await self._has_route("/weights_checker"):
            return {}
        answer = await self._post_and_check("/weights_checker", {"action": "checksum"})
        return {
            f"{name}@{rank}": checksum
            for rank, part in enumerate(answer["ranks"])
            for name, checksum in part["checksums"].items()
        }

    async def release_memory(self) -> None:
        await self.post("/release_memory_occupation", {})

    async def resume_weights(self) -> None:
        await self.post("/resume_memory_occupation", {"tags": ["weights", "cuda_graph"]})

    async def resume_kv_cache(self) -> None:
        await self.post("/resume_memory_occupation", {"tags": ["kv_cache"]})

    async def _set_version(self, version: str) -> None:
        await self._post_and_check(
            "/update_weight_version", {"new_version": version, "abort_all_requests": False}
        )

    async def _is_deterministic(self) -> bool:
        if self._known_deterministic is None:
            self._known_deterministic = bool(
                (await self.get("/server_info")).get("enable_deterministic_inference")
            )
        return self._known_deterministic

    async def _has_route(self, route: str) -> bool:
        if self._known_routes is None:
            self._known_routes = await self.get_routes()
        return route in self._known_routes

    async def _end_if_any(self, path: str, body: Mapping[str, Any]) -> None:
        """End an update or a group, if open."""
        # A live server refuses if no update or group is open.
        if await self._has_route(path):
            try:
                await self._post_and_check(path, body)
            except ServerError as error:
                if not error.alive:
                    raise

    async def _post_and_check(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request; raise ServerError unless successful."""
        answer = await self.post(path, body)
        if not (isinstance(answer, Mapping) and answer.get("success")):
            raise ServerError(self.url, f"refused {path}: {answer}", alive=True)
        return answer

    def _parse_result(
        self,
        answer: Mapping[str, Any],
        prompt: int,
        sampling: Sampling,
    ) -> GenerateResult:
        meta = answer["meta_info"]
        tokens = answer["output_ids"]
        reason = meta["finish_reason"]["type"]
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs", ())]
        if sampling.sampling_mask:
            # ``output_token_logprobs`` are of the whole vocabulary.
            logprobs = meta.get("output_token_sampling_logprobs", ())
        if len(logprobs) != len(tokens) or reason not in ("stop", "length", "abort"):
            content = (
                f"{len(tokens)} tokens, {len(logprobs)} log-probabilities, finish reason "
                f"{meta['finish_reason']}"
            )
            raise ServerError(
                self.url, f"gave an answer that cannot be used: {content}", alive=True
            )
        entropies = None
        if sampling.needs_entropies:
            top_logprobs = []
            for top in meta.get("output_top_logprobs") or ():
                top_logprobs.append([entry[0] for entry in top])
            entropies = compute_entropy_bounds(top_logprobs)
            if len(entropies) != len(tokens):
                content = f"{len(tokens)} tokens, and the likeliest ones of {len(entropies)}"
                raise ServerError(
                    self.url, f"gave an answer that cannot be used: {content}", alive=True
                )
        # Without a list of versions, all tokens have the same version.
        spans = meta.get("weight_versions") or [
            {"version": meta["weight_version"], "start": 0, "end": len(tokens)}
        ]
        encoded = meta.get("routed_experts")
        routing = None if encoded is None else np.frombuffer(base64.b64decode(encoded), np.int32)
        return GenerateResult(
            token_ids=np.array(tokens, np.int32),
            logprobs=as_logprobs(logprobs),
            versions=tuple(
                (str(s["version"]), s["end"] - s["start"]) for s in spans if s["end"] > s["start"]
            ),
            reason=reason,
            routing=self.parse_routing(sampling, prompt, len(tokens), reason, routing),
            entropies=entropies,
            sampling_mask=self.parse_mask(
                sampling, len(tokens), meta.get("output_token_sampling_mask")
            ),
        )


def _build_update_fields(version: str | None) -> dict[str, Any]:
    """Build the common fields of update requests."""
    # Caches of prompts are flushed only at the end of an update.
    return {"flush_cache": False} | ({} if version is None else {"weight_version": version})


def _parse_dtype(name: str | None) -> str | None:
    return None if name in (None, "auto") else name


def server_flags(config: Config, secret_file: Path) -> list[str]:
    """See :attr:`EngineSpec.flags`."""
    flags = ["--model-path", str(config.model.folder.absolute())]
    flags += ["--config", str(secret_file), "--skip-tokenizer-init"]
    return flags + (["--enable-memory-saver"] if config.rollout.colocated else [])


def adapter_flags(lora: LoraConfig) -> list[str]:
    """See :attr:`EngineSpec.adapter_flags`."""
    flags = ["--enable-lora", "--max-loras-per-batch", "2", "--max-lora-rank", str(lora.rank)]
    return [*flags, "--lora-target-modules", *lora.targets]


SPEC = EngineSpec(
    client=SglangClient,
    command=(sys.executable, "-m", "sglang.launch_server"),
    module="sglang.launch_server",
    reserved_flags=(
        "--model-path",
        "--model",
        "--host",
        "--port",
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        "--dtype",
        "--pp-size",
        "--pipeline-parallel-size",
        "--api-key",
        "--admin-api-key",
        "--config",
    ),
    lossy_flags=("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
    memory_flag=("--mem-fraction-static", "a fraction of the memory that is free at its start"),
    memory_of_free=True,
    flags=server_flags,
    adapter_flags=adapter_flags,
    # SGLang sets this variable itself, unless already set.
    rank_environment={"NCCL_CUMEM_ENABLE": "0"},
)
