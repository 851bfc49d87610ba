"""Requests to a stock vLLM server (0.32), with our extension of its workers for weights
(``vllm_plugin/``).

Properties of vLLM:

- The model's end-of-sequence tokens stop a completion, whether they were asked for or not.
  ``ignore_eos`` prevents that, and leaves ``stop_token_ids`` as they are.
- ``/health`` answers even where the engine hangs.
- ``keep`` is the only mode of ``/pause`` that leaves requests alive. A second request has their
  cache computed again.
- A layer that an update leaves out keeps its old weights, and vLLM only warns. Our extension
  refuses such an update.
- The version is whatever it was last told. We set it to ``incomplete`` while weights may be of two
  versions.
- A request whose adapter was loaded with ``load_inplace`` has it read from disk again with every
  step. So we unload it instead, which only forgets the name, and load the next one under that name.
  That takes the place of the oldest one.
- Cached prompts are told apart by an adapter's name and path, and not by what it holds.
- Among the likeliest tokens it names the drawn one first, and then leaves out the last of them if
  it was not one.
- On CPU, its checksums of all parameters that are prepacked are those of empty tensors.
- On CPU, a request with a seed kills the server where one step computes only a part of its prompt.
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
"""How long a server may take to describe itself: it looks at all of its machine, the first time."""
NO_LOGPROB = -9999.0
"""vLLM's number for minus infinity, or for a missing log-probability."""

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
"""Routes that we cannot do without, and what a server must be started with to have them."""

LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's limit on the ranks of adapters."""


class VllmClient(ServerClient):
    """See :class:`ServerClient`."""

    _known_config: Mapping[str, Any] | None = None

    async def get_info(self) -> ServerInfo:
        """
        Raises:
            ServerError: it lacks a route, or was started so that it gives other log-probabilities;
                the message says what to start it with.
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
        # After a part of a prompt, vLLM sets the seed's generator back. On CPU torch's generator
        # cannot be set back, and the engine ends. Which prompts are computed in parts depends on
        # all other requests of that moment.
        self.seeded = config["device_config"]["device"] != "cpu"
        return ServerInfo(
            model=model["model"],
            architecture=None,
            dtype=str(model["dtype"]).removeprefix("torch."),
            max_tokens=model["max_model_len"],
            routing=bool(config.get("aux_output_config", {}).get("enable_return_routed_experts")),
            lora_rank=lora["max_lora_rank"] if lora else 0,
            lora_targets=frozenset((lora["target_modules"] or ("all",)) if lora else ()),
        )

    async def health(self, timeout_s: float) -> None:
        """Ask for what the engine answers between two steps, when all of its ranks and their
        devices are done.

        A request for a token would wait behind all others, and for ever while the server is paused.
        While a server receives weights it does not answer this.
        """
        await self.get("/health", timeout_s=timeout_s)
        await self.post("/collective_rpc", {"method": "synchronize_device"}, timeout_s=timeout_s)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> list[GenerateResult]:
        """vLLM makes only one greedy sample, since all are the same; it is returned
        ``sampling.samples`` times."""
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
        if self.seeded:
            parameters["seed"] = sampling.seed & (
                2**62 - 1
            )  # vLLM adds the sample's number, in 64 bits with a sign
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
        # Less time than we have, so that the server says what is wrong before we stop listening.
        await self._call_receivers("join", **asdict(group), timeout_s=0.9 * self.timeout_s)

    async def leave(self, group: str) -> None:
        await self._call_receivers("leave", name=group)

    async def update_from_distributed(
        self, manifest: Manifest, group: str, version: str | None
    ) -> None:
        """The version comes with the end of the update."""
        await self._call_receivers("update_from_distributed", group=group, **asdict(manifest))

    async def update_from_disk(self, folder: Path, version: str) -> None:
        """This works without our extension, too, but not on CPU: there a tied head would keep what
        it packed before.

        The version comes with the end of the update.
        """
        if await self._has_extension():
            await self._call_receivers("update_from_disk", folder=str(folder))
        else:
            await self._call_all_ranks("reload_weights", {"weights_path": str(folder)})

    async def load_adapter_from(self, folder: Path) -> None:
        try:
            await self.post(UNLOAD_ADAPTER, {"lora_name": ADAPTER})
        except ServerError as error:  # refused where none was loaded
            if not error.alive:
                raise
        await self.post(LOAD_ADAPTER, {"lora_name": ADAPTER, "lora_path": str(folder)})

    async def get_version(self) -> str:
        return str((await self.get("/weight_info"))["weight_version"])

    async def get_checksums(self) -> dict[str, str]:
        """Without those of empty tensors: on CPU, what a layer has prepacked leaves one behind."""
        if "/weight_checker" not in await self.get_routes():
            return {}
        answer = await self.post("/weight_checker", {"action": "checksum"})
        empty = hashlib.sha256().hexdigest()
        named = {}
        for place, digest in answer["checksums"].items():
            rank, _, name = place.rpartition(":")  # dp0:pp0:pcp0:tp0:model.norm.weight
            if digest != empty:
                named[f"{name}@{rank}"] = digest
        return named

    async def release_memory(self) -> None:
        """The weights go to the host's memory, so that a server woken without an update still has
        them.

        On CPU the server says yes and does nothing.
        """
        config = await self._get_config()
        if (
            not config["model_config"]["enable_sleep_mode"]
            and config["device_config"]["device"] != "cpu"
        ):
            raise ServerError(
                self.url, "cannot release its memory: start it with --enable-sleep-mode", alive=True
            )
        await self.post("/sleep", {}, level="1", mode="keep")

    async def resume_weights(self) -> None:
        await self.post("/wake_up", {}, tags="weights")

    async def resume_kv_cache(self) -> None:
        """The server then generates at once: vLLM does not stay paused over this."""
        await self.post("/wake_up", {}, tags="kv_cache")

    async def _get_config(self) -> Mapping[str, Any]:
        if self._known_config is None:
            answer = await self.get("/server_info", timeout_s=DESCRIPTION_S, config_format="json")
            self._known_config = answer["vllm_config"]
        return self._known_config

    async def _uses_receiver(self) -> bool:
        """Whether an update is one of our extension's, which wants all weights."""
        return not self.adapted and await self._has_extension()

    async def _has_extension(self) -> bool:
        return (await self._get_config())["parallel_config"]["worker_extension_cls"] == EXTENSION

    async def _call_receivers(self, order: str, **arguments: Any) -> None:
        """Have every rank's receiver do something. All of them answer, also where one fails."""
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
        self, choice: Mapping[str, Any], prompt: int, sampling: Sampling
    ) -> GenerateResult:
        tokens = choice["token_ids"]
        reason = choice["finish_reason"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        spans = choice["weight_versions"] or []
        counts = [span["end"] - span["start"] for span in spans]
        if not (len(logprobs) == len(tokens) == sum(counts)) or reason not in (
            "stop",
            "length",
            "abort",
        ):
            said = (
                f"{len(tokens)} tokens, {len(logprobs)} log-probabilities, versions {spans}, "
                f"finish reason {reason}"
            )
            raise ServerError(self.url, f"gave an answer that cannot be used: {said}", alive=True)
        if NO_LOGPROB in logprobs:
            raise ServerError(
                self.url,
                f"gave no log-probability for token {logprobs.index(NO_LOGPROB)}",
                alive=True,
            )
        told = choice.get("routed_experts")
        routing = (
            None if told is None else np.load(BytesIO(base64.b64decode(told)))
        )  # which unpickles nothing
        return GenerateResult(
            token_ids=np.array(tokens, np.int32),
            logprobs=as_logprobs(logprobs),
            versions=tuple(
                (str(span["version"]), count) for span, count in zip(spans, counts, strict=True)
            ),
            reason=reason,
            routing=self.parse_routing(sampling, prompt, len(tokens), reason, routing),
            entropies=_compute_entropy_bounds(choice["logprobs"]["content"])
            if sampling.needs_entropies
            else None,
        )


def _compute_entropy_bounds(content: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Entropy bounds from all reported likeliest tokens but the last, which is missing after some
    draws."""
    told = [
        sorted((entry["logprob"] for entry in token["top_logprobs"]), reverse=True)
        for token in content
    ]
    return compute_entropy_bounds([logprobs[: TOP_LOGPROBS - 1] for logprobs in told])


def server_environment(secret: str) -> dict[str, str]:
    """Environment of a server that wants this secret."""
    paths = [str(PLUGIN), os.environ.get("PYTHONPATH", "")]
    return {
        "VLLM_API_KEY": secret,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # It would bind the default group to a device, and torch then splits every new group off
        # that one's NCCL communicator, of which the trainer is no server.
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP": "0",
        # On CPU it would bind every server to the same cores, and refuse more ranks than there are
        # NUMA nodes.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }


def server_flags(config: Config, secret_file: Path) -> list[str]:
    """See :attr:`EngineSpec.flags`. With ``LOCK`` every route requires the secret of VLLM_API_KEY,
    not only those that generate. A CPU refuses to sleep."""
    flags = ["--model", str(config.model.folder.absolute())]
    flags += [
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
    ]
    flags += ["--worker-extension-cls", EXTENSION, "--middleware", LOCK]
    return flags + (["--enable-sleep-mode"] if config.rollout.colocated else [])


def adapter_flags(lora: LoraConfig) -> list[str]:
    """See :attr:`EngineSpec.adapter_flags`."""
    return [
        "--enable-lora",
        "--max-lora-rank",
        str(min(n for n in ADAPTER_RANKS if n >= lora.rank)),
    ]


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
    memory_flag=("--gpu-memory-utilization", "a share of the whole GPU"),
    memory_of_free=False,
    flags=server_flags,
    environment=server_environment,
    adapter_flags=adapter_flags,
    adapter_environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    adapter_files=True,
)
