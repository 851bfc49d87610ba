"""Requests to a stock vLLM server (0.32), with our extension of vLLM's workers for loading weights
(``vllm_plugin/``).

Properties of vLLM:

- The model's end-of-sequence tokens stop a completion, unless ``ignore_eos`` is set, which does not
  affect ``stop_token_ids``.
- ``/health`` answers even if the engine hangs.
- ``keep`` is the only mode of ``/pause`` that keeps requests alive. A second request recomputes the
  cache of the kept requests.
- A layer missing in an update keeps the old weights with a mere warning. The extension refuses the
  update.
- The version is the last value set by a client: ``incomplete`` during an update.
- An adapter loaded with ``load_inplace`` is read from disk again at every step of a request.
  Instead the adapter is unloaded, which only removes the name, and the next adapter, loaded under
  the same name, replaces the oldest adapter.
- Cached prompts are distinguished by an adapter's name and path, not by content.
- In the list of likeliest tokens, the drawn token comes first, and may displace the last.
- On CPU, prepacked parameters have checksums of empty tensors.
- With ``--return-sampling-mask``, every request needs a temperature and ``top_k`` above 0, and the
  answer has the kept ids. CPU servers do not support the flag.
- On CPU, a request with a seed kills the server if a step computes only a part of the prompt.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config, LoraConfig
from megatron_dppo.rl.numbers import as_logprobs
from megatron_dppo.rollout.servers.client import (
    ADAPTER,
    CONTROL_S,
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
from megatron_dppo.rollout.servers.http import ServerError
from megatron_dppo.rollout.servers.launch import EngineSpec

if TYPE_CHECKING:
    from megatron_dppo.rollout.engine import Sampling

PLUGIN = Path(__file__).parent / "vllm_plugin"
EXTENSION = "megatron_dppo_vllm.worker.WorkerExtension"
LOCK = "megatron_dppo_vllm.lock.Lock"
DESCRIPTION_S = 120.0
"""Timeout in seconds of a server's description, for which the server inspects the machine."""
NO_LOGPROB = -9999.0
"""vLLM's number for minus infinity or a missing log-probability."""

DEVELOPMENT = "the environment variable VLLM_SERVER_DEV_MODE=1"
GIVEN_BY = {
    "/inference/v1/generate": "--enable-scale-out",
    "/weight_info": DEVELOPMENT,
    "/get_world_size": DEVELOPMENT,
    "/pause": DEVELOPMENT,
    "/resume": DEVELOPMENT,
    "/reset_prefix_cache": DEVELOPMENT,
    "/collective_rpc": DEVELOPMENT,
    "/server_info": DEVELOPMENT,
    "/update_weight_version": DEVELOPMENT,
}
"""Required routes, each with the enabling flag or variable."""

LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's limit on ranks."""


class VllmClient(ServerClient):
    """See :class:`ServerClient`."""

    _known_config: Mapping[str, Any] | None = None
    _known_masks: bool = False

    async def get_info(self) -> ServerInfo:
        """Return the properties of the server.

        Raises:
            ServerError: names the missing flag, if a route is missing or the log-probabilities are
                of another kind.
        """
        routes = await self.get_routes()
        for route, giver in GIVEN_BY.items():
            if route not in routes:
                raise ServerError(self.url, f"has no {route}: start it with {giver}", alive=True)
        config = await self._get_config()
        model = config["model_config"]
        lora = config.get("lora_config") if LOAD_ADAPTER in routes else None
        if model["logprobs_mode"] != "processed_logprobs":
            problem = (
                f"gives {model['logprobs_mode']}: start it with --logprobs-mode processed_logprobs"
            )
            raise ServerError(self.url, problem, alive=True)
        self.ranks = int((await self.get("/get_world_size"))["world_size"])
        # After a part of a prompt, vLLM resets the seed's generator. On CPU that is impossible, and
        # the engine dies. The division of prompts depends on all pending requests.
        self.seeded = config["device_config"]["device"] != "cpu"
        self._known_masks = bool(model.get("return_sampling_mask"))
        return ServerInfo(
            model=model["model"],
            architecture=None,
            dtype=str(model["dtype"]).removeprefix("torch."),
            max_tokens=model["max_model_len"],
            routing=bool(config.get("aux_output_config", {}).get("enable_return_routed_experts")),
            sampling_mask=self._known_masks,
            lora_rank=lora["max_lora_rank"] if lora else 0,
            lora_targets=frozenset((lora["target_modules"] or ("all",)) if lora else ()),
        )

    async def health(self, timeout_s: float) -> None:
        """Request an answer that the engine gives between two steps. Not answered while the server
        is receiving weights."""
        # A request for a token would wait behind all requests, and forever in a paused server.
        await self.get("/health", timeout_s=timeout_s)
        await self.post("/collective_rpc", {"method": "synchronize_device"}, timeout_s=timeout_s)

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        timeout_s: float,
    ) -> list[GenerateResult]:
        # At temperature 0 vLLM computes a single sample, since all samples are equal.
        greedy = sampling.temperature == 0
        parameters: dict[str, Any] = {
            "n": 1 if greedy else sampling.samples,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            **sampling.truncation,
            "logprobs": TOP_LOGPROBS if sampling.needs_entropies else 0,
            "detokenize": False,
        }
        if greedy and self._known_masks:
            parameters |= {"temperature": 1.0, "top_k": 1}
        if self.seeded:
            # vLLM adds the sample's number, in signed 64 bits.
            parameters["seed"] = sampling.seed & (2**62 - 1)
        body = {"token_ids": list(token_ids), "sampling_params": parameters}
        if self.adapted:
            body["model"] = ADAPTER
        answer = await self.post("/inference/v1/generate", body, timeout_s=timeout_s)
        results = [
            self._parse_result(choice, len(token_ids), sampling) for choice in answer["choices"]
        ]
        return results * sampling.samples if greedy else results

    async def pause(self, in_flight: InFlight) -> None:
        mode = "abort" if in_flight == "abort" else "keep"
        await self.post("/pause", {}, mode=mode, clear_cache="false")
        if in_flight == "retract":
            await self._flush(reset_running_requests="true")

    async def resume(self) -> None:
        await self.post("/resume", {})

    async def flush(self) -> None:
        await self._flush()

    async def begin_update(self) -> None:
        if await self._uses_receiver():
            await self._call_receivers("begin")
        await self._set_version(INCOMPLETE)

    async def end_update(self, version: str) -> None:
        if await self._uses_receiver():
            await self._call_receivers("end")
        await self._set_version(version)

    async def abort_update(self) -> None:
        if await self._uses_receiver():
            await self._call_receivers("abandon")

    async def join(self, group: WeightGroup) -> None:
        # Shorter than the request's timeout, so that the server can report the problem.
        await self._call_receivers("join", **asdict(group), timeout_s=0.9 * self.timeout_s)

    async def leave(self, group: str) -> None:
        await self._call_receivers("leave", name=group)

    async def update_from_distributed(
        self,
        manifest: Manifest,
        group: str,
        version: str | None,
    ) -> None:
        """Ignore ``version``, which is set at the end of the update."""
        await self._call_receivers("update_from_distributed", group=group, **asdict(manifest))

    async def update_from_disk(self, folder: Path, version: str) -> None:
        """Load a Hugging Face directory; ``version`` is set at the end of the update."""
        # On CPU, without the extension, a tied head would keep the old packed weights.
        if await self._has_extension():
            await self._call_receivers("update_from_disk", folder=str(folder))
        else:
            await self._call_all_ranks("reload_weights", {"weights_path": str(folder)})

    async def load_adapter_from(self, folder: Path) -> None:
        try:
            await self.post(UNLOAD_ADAPTER, {"lora_name": ADAPTER})
        # vLLM refuses to unload before the first load.
        except ServerError as error:
            if not error.alive:
                raise
        # The new path separates cached prompts from older prompts.
        await self.post(LOAD_ADAPTER, {"lora_name": ADAPTER, "lora_path": str(folder)})

    async def get_version(self) -> str:
        return str((await self.get("/weight_info"))["weight_version"])

    async def get_checksums(self) -> dict[str, str]:
        """Return checksums, on CPU without prepacked layers, which leave an empty tensor."""
        if "/weight_checker" not in await self.get_routes():
            return {}
        answer = await self.post("/weight_checker", {"action": "checksum"})
        empty = hashlib.sha256().hexdigest()
        named = {}
        for place, digest in answer["checksums"].items():
            # Format: dp0:pp0:pcp0:tp0:model.norm.weight
            rank, _, name = place.rpartition(":")
            if digest != empty:
                named[f"{name}@{rank}"] = digest
        return named

    async def release_memory(self) -> None:
        """Move the weights to host memory, so that a server resumed without an update has weights.
        Without an effect on CPU."""
        config = await self._get_config()
        sleeps = config["model_config"]["enable_sleep_mode"]
        if not sleeps and config["device_config"]["device"] != "cpu":
            raise ServerError(
                self.url, "cannot release its memory: start it with --enable-sleep-mode", alive=True
            )
        await self.post("/sleep", {}, level="1", mode="keep")

    async def resume_weights(self) -> None:
        await self.post("/wake_up", {}, tags="weights")

    async def resume_kv_cache(self) -> None:
        """Restore the cache. Generation resumes immediately, even of a paused server."""
        await self.post("/wake_up", {}, tags="kv_cache")

    async def _get_config(self) -> Mapping[str, Any]:
        if self._known_config is None:
            answer = await self.get("/server_info", timeout_s=DESCRIPTION_S, config_format="json")
            self._known_config = answer["vllm_config"]
        return self._known_config

    async def _uses_receiver(self) -> bool:
        """Return whether updates go through the extension, which needs all weights."""
        return not self.adapted and await self._has_extension()

    async def _has_extension(self) -> bool:
        return (await self._get_config())["parallel_config"]["worker_extension_cls"] == EXTENSION

    async def _call_receivers(self, order: str, **arguments: Any) -> None:
        if not await self._has_extension():
            flag = f"--worker-extension-cls {EXTENSION}"
            problem = (
                f"can load weights from disk only: start it with {flag} and {PLUGIN} on its "
                "PYTHONPATH"
            )
            raise ServerError(self.url, problem, alive=True)
        answers = await self._call_all_ranks("megatron_dppo", {"order": order, **arguments})
        for rank, answer in enumerate(answers):
            if answer is not None:
                raise ServerError(
                    self.url,
                    f"failed to {order} at its rank {rank}: {answer['problem']}",
                    alive=True,
                )

    async def _call_all_ranks(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        body = {"method": method, "kwargs": arguments}
        return (await self.post("/collective_rpc", body))["results"]

    async def _set_version(self, version: str) -> None:
        await self.post("/update_weight_version", {"new_version": version})

    async def _flush(self, **query: str) -> None:
        answer = await self.post("/reset_prefix_cache", {}, timeout_s=CONTROL_S, **query)
        if not answer["success"]:
            raise ServerError(
                self.url, "did not drop its cache: requests still hold parts of it", alive=True
            )

    def _parse_result(
        self,
        choice: Mapping[str, Any],
        prompt: int,
        sampling: Sampling,
    ) -> GenerateResult:
        tokens = choice["token_ids"]
        reason = choice["finish_reason"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        spans = choice["weight_versions"] or []
        counts = [span["end"] - span["start"] for span in spans]
        is_whole = len(logprobs) == len(tokens) == sum(counts)
        if not is_whole or reason not in ("stop", "length", "abort"):
            content = (
                f"{len(tokens)} tokens, {len(logprobs)} log-probabilities, versions {spans}, "
                f"finish reason {reason}"
            )
            raise ServerError(
                self.url, f"gave an answer that cannot be used: {content}", alive=True
            )
        if NO_LOGPROB in logprobs:
            raise ServerError(
                self.url,
                f"gave no log-probability for token {logprobs.index(NO_LOGPROB)}",
                alive=True,
            )
        encoded = choice.get("routed_experts")
        # By default np.load refuses pickled content.
        routing = None if encoded is None else np.load(BytesIO(base64.b64decode(encoded)))
        entropies = None
        if sampling.needs_entropies:
            entropies = _compute_entropy_bounds(choice["logprobs"]["content"])
        return GenerateResult(
            token_ids=np.array(tokens, np.int32),
            logprobs=as_logprobs(logprobs),
            versions=tuple(
                (str(span["version"]), count) for span, count in zip(spans, counts, strict=True)
            ),
            reason=reason,
            routing=self.parse_routing(sampling, prompt, len(tokens), reason, routing),
            entropies=entropies,
            sampling_mask=self.parse_mask(sampling, len(tokens), choice.get("sampling_mask")),
        )


def _compute_entropy_bounds(content: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Compute entropy bounds without the last reported token, missing after some draws."""
    top = []
    for token in content:
        logprobs = [entry["logprob"] for entry in token["top_logprobs"]]
        top.append(sorted(logprobs, reverse=True)[: TOP_LOGPROBS - 1])
    return compute_entropy_bounds(top)


def server_environment(secret: str) -> dict[str, str]:
    paths = [str(PLUGIN), os.environ.get("PYTHONPATH", "")]
    return {
        "VLLM_API_KEY": secret,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Otherwise vLLM binds the default group to a device, and torch splits every new group off
        # the default group's NCCL communicator, without the trainer.
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP": "0",
        # On CPU, vLLM would bind all servers to the same cores, and refuse more ranks than NUMA
        # nodes.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }


def server_flags(config: Config, secret_file: Path) -> list[str]:
    """See :attr:`EngineSpec.flags`."""
    # With ``LOCK`` every route requires the secret of VLLM_API_KEY, not only generation.
    flags = ["--model", str(config.model.folder.absolute())]
    flags += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    flags += ["--generation-config", "vllm"]
    flags += ["--worker-extension-cls", EXTENSION, "--middleware", LOCK]
    return flags + (["--enable-sleep-mode"] if config.rollout.colocated else [])


def adapter_flags(lora: LoraConfig) -> list[str]:
    """See :attr:`EngineSpec.adapter_flags`."""
    limit = min(rank for rank in ADAPTER_RANKS if rank >= lora.rank)
    return ["--enable-lora", "--max-lora-rank", str(limit)]


SPEC = EngineSpec(
    client=VllmClient,
    command=("vllm", "serve"),
    module="vllm.entrypoints.openai.api_server",
    reserved_flags=(
        "--model",
        "--host",
        "--port",
        "--tensor-parallel-size",
        "-tp",
        "--dtype",
        "--api-key",
    ),
    lossy_flags=("synthetic",),
    mask_flags=("--return-sampling-mask",),
    memory_flag=("--gpu-memory-utilization", "a fraction of the memory of the GPU"),
    memory_of_free=False,
    flags=server_flags,
    environment=server_environment,
    adapter_flags=adapter_flags,
    adapter_environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    adapter_files=True,
)
