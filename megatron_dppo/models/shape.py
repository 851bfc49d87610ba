"""The sizes of a policy, read from a Hugging Face directory, and the layouts that they allow. Needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dppo.config import LayoutConfig
from megatron_dppo.config import replace as with_values
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.layout import stage_layers
from megatron_dppo.rl.types import RoutingShape

ARCHITECTURES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
}
"""Supported architectures, as config.json names them, with their ``model_type``. Qwen2.5 uses Qwen2's name."""
LARGEST = {"num_hidden_layers": 10_000, "num_experts": 100_000, "num_local_experts": 100_000}
"""Most of what names of tensors are made for; of anything else there may be 10⁹."""
ROPE_THETA = 10000.0
"""transformers' own, for a config.json that names none."""

DIMENSIONS = {
    "embed_tokens": ("vocabulary", "hidden"),
    "lm_head": ("vocabulary", "hidden"),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "q_norm": ("head",),
    "k_norm": ("head",),
    "gate_proj": ("feed_forward", "hidden"),
    "up_proj": ("feed_forward", "hidden"),
    "down_proj": ("hidden", "feed_forward"),
    "gate": ("experts", "hidden"),
}
"""The dimensions of a Hugging Face module's weight, outputs first; a bias has the outputs. Of other norms: hidden."""


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """A Qwen: grouped-query attention, SwiGLU or experts of it, RMSNorm, rotary positions.

    Qwen3 normalises its queries and keys; Qwen2.5 gives them, and the values, biases instead.
    """

    num_layers: int
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; each serves ``heads / kv_heads`` query heads."""
    head_dim: int
    """Width of one head; heads · head_dim need not be ``hidden``."""
    ffn: int
    """Width of the feed-forward layer, or of each expert: of the gate and of the up projection, each."""
    vocab_size: int
    """Tokens, before any padding."""
    tied: bool
    """Whether the output layer is the embedding."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rms_eps: float
    max_positions: int
    """Longest sequence that the policy was made for, in tokens."""
    architecture: str = "Qwen3ForCausalLM"
    """One of :data:`ARCHITECTURES`."""
    experts: int = 0
    """Experts in every layer; 0: a dense policy."""
    experts_per_token: int = 0
    renormalises_experts: bool = True
    """Whether the weights of a token's experts are made to sum to one."""

    def with_experts(self, experts: int, *, per_token: int) -> PolicyShape:
        """The Qwen3-MoE of these sizes."""
        return replace(self, architecture="Qwen3MoeForCausalLM", experts=experts, experts_per_token=per_token)

    @property
    def extents(self) -> dict[str, int]:
        """How much there is of what :data:`DIMENSIONS` names."""
        return {
            "vocabulary": self.vocab_size,
            "hidden": self.hidden,
            "queries": self.heads * self.head_dim,
            "keys": self.kv_heads * self.head_dim,
            "head": self.head_dim,
            "experts": self.experts,
            "feed_forward": self.ffn,
        }

    @property
    def routing(self) -> RoutingShape:
        """How its choice of experts is written down."""
        return RoutingShape(self.num_layers, self.experts_per_token, self.experts)

    @property
    def qk_norm(self) -> bool:
        return self.architecture != "Qwen2ForCausalLM"

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "Qwen2ForCausalLM"


def read_shape(path: str | Path) -> PolicyShape:
    """The shape that a Hugging Face directory's ``config.json`` describes.

    Raises:
        UserError: on ``model.path``, if there is no such directory or file, or if it holds another kind of model.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        problem = "has no config.json" if Path(path).is_dir() else "is not a directory"
        remedy = (
            "give the directory of a Qwen3 model or its id on the hub; `megatron-dppo init` makes a fresh policy, and "
            "`megatron-dppo sft` warms it up"
        )
        raise UserError("model.path", path, problem, remedy)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        problem = f"its config.json is not JSON ({error})"
        raise UserError("model.path", path, problem, "fetch the model again") from error
    if not isinstance(config, dict):
        raise UserError("model.path", path, "its config.json is no JSON object", "fetch the model again")
    try:
        _refuse_other_models(path, config)
        return _shape(config)
    except KeyError as error:
        raise UserError("model.path", path, f"its config.json has no {error}", "fetch the model again") from error
    except ValueError as error:
        raise UserError("model.path", path, f"its config.json has {error}", "fetch the model again") from error


def _shape(config: dict[str, Any]) -> PolicyShape:
    heads, (architecture,) = _count(config, "num_attention_heads"), config["architectures"]
    moe, dense_qwen3 = architecture == "Qwen3MoeForCausalLM", architecture == "Qwen3ForCausalLM"
    thetas = _rope(config).get("rope_theta"), config.get("rope_theta")
    # Only the dense Qwen3's files never leave it out.
    head_dim_given = dense_qwen3 or config.get("head_dim") is not None
    return PolicyShape(
        num_layers=_count(config, "num_hidden_layers"),
        hidden=_count(config, "hidden_size"),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads"),
        head_dim=_count(config, "head_dim") if head_dim_given else _count(config, "hidden_size") // heads,
        ffn=_count(config, "moe_intermediate_size" if moe else "intermediate_size"),
        vocab_size=_count(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=_number("rope_theta", next((each for each in thetas if each is not None), ROPE_THETA)),
        rms_eps=_number("rms_norm_eps", config["rms_norm_eps"]),
        max_positions=_count(config, "max_position_embeddings"),
        architecture=architecture,
        # Transformers 5 writes num_local_experts; before, it was num_experts.
        experts=_count(config, "num_local_experts" if config.get("num_local_experts") else "num_experts") if moe else 0,
        experts_per_token=_count(config, "num_experts_per_tok") if moe else 0,
        renormalises_experts=bool(config.get("norm_topk_prob", False)) if moe else True,
    )


def _count(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} = {json.dumps(value):.60}, which is no count")
    if value > (most := LARGEST.get(key, 10**9)):
        raise ValueError(f"{key} = {value:.6g}, which is more than {most:,}")
    return value


def _number(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key} = {json.dumps(value):.60}, which is no number above 0")
    return float(value)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Transformers 5 writes ``rope_parameters``; before, there were ``rope_theta`` and ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters = {json.dumps(rope):.60}, which is no object")
    return rope


def _refuse_other_models(path: str | Path, config: dict[str, Any]) -> None:
    """Refuse what would load and then compute something else."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"architectures = {json.dumps(architectures):.60}, which is no list of names")
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        found = ", ".join(architectures) or config.get("model_type") or "of no named kind"
        known = " or ".join(ARCHITECTURES)
        raise UserError("model.path", path, f"holds a model that is {found}", f"give one that is {known}")
    known = ARCHITECTURES[architectures[0]]
    if (kind := config.get("model_type", known)) != known:
        problem = f"its config.json says that {architectures[0]} is of model_type {json.dumps(kind):.60}"
        raise UserError("model.path", path, problem, f"set it to {known}, or fetch the model again")
    rope = _rope(config)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        f"scales its rotary positions ({scaling})": scaling != "default",
        "attends through a sliding window": bool(config.get("use_sliding_window")),
        "has biases in its attention": bool(config.get("attention_bias")),
        "has dense layers among those with experts": bool(config.get("mlp_only_layers"))
        or config.get("decoder_sparse_step", 1) != 1,
        "gives every token a single expert, always of weight one": bool(config.get("norm_topk_prob"))
        and config.get("num_experts_per_tok") == 1,
        f"has the activation {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
    }
    for problem, found in unsupported.items():
        if found:
            raise UserError("model.path", path, f"it {problem}, which is not supported", "give a plain Qwen")


def check_layout(shape: PolicyShape, layout: LayoutConfig) -> None:
    """Check that a policy of this shape can be cut as the layout says; ``sequence_parallel`` at tp 1 means nothing.

    Raises:
        UserError: naming the setting and the values that would work.
    """
    parts = {f"the {shape.kv_heads} key-value heads": shape.kv_heads, f"the {shape.heads} query heads": shape.heads}
    if not shape.experts:
        parts[f"the {shape.ffn} feed-forward units"] = shape.ffn
    for what, size in parts.items():
        if size % layout.tp:
            possible = _divisors(math.gcd(*parts.values()))
            raise UserError("layout.tp", layout.tp, f"does not divide {what}", f"set it to one of {possible}")
    _check_stages(shape.num_layers, layout)
    _check_experts(shape, layout)


def _check_stages(layers: int, layout: LayoutConfig) -> None:
    uneven = {
        name: getattr(layout, name)
        for name in ("first_stage_layers", "last_stage_layers")
        if getattr(layout, name) is not None
    }
    if layout.pp == 1:
        for name, value in {**uneven, "vpp": layout.vpp if layout.vpp > 1 else None}.items():
            if value is not None:
                problem = "cuts pipeline stages, and layout.pp = 1 makes a single one"
                raise UserError(f"layout.{name}", value, problem, "leave it out, or set layout.pp to 2 or more")
    if _can_be_cut(layers, layout):
        return
    given = "".join(f", layout.{name} = {value}" for name, value in uneven.items())
    if layout.vpp > 1:
        given += f", layout.vpp = {layout.vpp}"
    problem = f"does not cut the {layers} layers into stages of equally many" + (f" (with{given[1:]})" if given else "")
    least = 2 if uneven or layout.vpp > 1 else 1
    possible = [pp for pp in range(least, layers + 1) if _can_be_cut(layers, with_values(layout, pp=pp))]
    remedies = [f"set it to one of {', '.join(map(str, possible))}"] if possible else []
    if layout.vpp > 1:
        possible = [vpp for vpp in range(1, layers + 1) if _can_be_cut(layers, with_values(layout, vpp=vpp))]
        remedies += [f"set layout.vpp to one of {', '.join(map(str, possible))}"] if possible else []
    if uneven:
        remedies.append("leave " + " and ".join(f"layout.{name}" for name in uneven) + " out")
    raise UserError("layout.pp", layout.pp, problem, ", or ".join(remedies))


def _can_be_cut(layers: int, layout: LayoutConfig) -> bool:
    if layout.pp * layout.vpp > layers:
        return False
    if layout.pp == 2 and layout.vpp > 1 and layout.first_stage_layers and layout.last_stage_layers:
        return False  # Megatron then divides the middle stages' layers by their number, which is 0
    try:
        return all(stage_layers(layers, stage, layout)[0] for stage in range(layout.pp))
    except ValueError:
        return False


def _check_experts(shape: PolicyShape, layout: LayoutConfig) -> None:
    if not shape.experts:
        for name, value in (("ep", layout.ep), ("etp", layout.expert_tp)):
            if value not in (1, layout.tp if name == "etp" else 1):
                problem = "is for policies with experts, and this one has none"
                raise UserError(f"layout.{name}", value, problem, "leave it out")
        return
    if shape.experts % layout.ep:
        problem = f"does not divide the {shape.experts} experts"
        raise UserError("layout.ep", layout.ep, problem, f"set it to one of {_divisors(shape.experts)}")
    if shape.ffn % layout.expert_tp:
        name, problem = "etp" if layout.etp else "tp", f"does not divide the {shape.ffn} units of an expert"
        remedy = f"set layout.etp to one of {_divisors(shape.ffn)}"
        raise UserError(f"layout.{name}", layout.expert_tp, problem, remedy)
    ranks = layout.expert_tp * layout.ep
    if max(ranks, layout.tp) % min(ranks, layout.tp):
        problem = (
            f"times layout.etp = {layout.expert_tp} neither divides layout.tp = {layout.tp} nor is a multiple of it"
        )
        sizes = [etp for etp in range(1, shape.ffn + 1) if shape.ffn % etp == 0]
        possible = [etp for etp in sizes if max(etp * layout.ep, layout.tp) % min(etp * layout.ep, layout.tp) == 0]
        listed = ", ".join(map(str, possible[:6]))
        remedy = f"set layout.etp to one of {listed}" if possible else "set it to a multiple or a divisor of layout.tp"
        raise UserError("layout.ep", layout.ep, problem, remedy)
    if layout.tp > 1 and not layout.sequence_parallel:
        problem = f"Megatron trains experts with layout.tp = {layout.tp} under sequence parallelism only"
        raise UserError("layout.sequence_parallel", "false", problem, "set it to true")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of embedding and output layer over all ranks: a multiple of 128, for the kernels, and of ``tp``.

    It is the same number for every tp that divides 128, so that a checkpoint fits any of these layouts.
    """
    unit = math.lcm(128, tp)
    return (vocab_size + unit - 1) // unit * unit


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False) -> PolicyShape:
    sizes = layers, hidden, heads, kv_heads, 128, ffn, 151936
    return PolicyShape(*sizes, tied, rope_theta=1e6, rms_eps=1e-6, max_positions=40960)


PUBLISHED = {
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 768).with_experts(128, per_token=8),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 4, 1536).with_experts(128, per_token=8),
}
"""The sizes of the published Qwen3 models."""
VARIANTS = ("-fp8", "-base", "-instruct-2507", "-thinking-2507", "-instruct", "-thinking")


def published(path: str) -> str | None:
    """The published Qwen3 that a path or an id is called after, as a key of ``PUBLISHED``."""
    name = Path(path).name.lower()
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return name if name in PUBLISHED else None
