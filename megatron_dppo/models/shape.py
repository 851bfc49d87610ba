"""Sizes of a policy, from a Hugging Face directory, and valid layouts. Needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from megatron_dppo.config import LayoutConfig
from megatron_dppo.config import replace as with_values
from megatron_dppo.errors import UserError
from megatron_dppo.models.families import FAMILIES
from megatron_dppo.models.family import Family, RopeScaling
from megatron_dppo.parallel.layout import list_stage_layers
from megatron_dppo.rl.types import RoutingShape

LARGEST = {"num_hidden_layers": 10_000, "num_experts": 100_000, "num_local_experts": 100_000}
"""Largest counts of layers and experts, because each has tensor names; further counts may be
10⁹."""
FP32 = 2.0**-126, 2.0**127
"""Least and largest number; beyond, fp32 rounds to 0 or infinity."""
LEAST = {"rope_theta": 1.0, "factor": 1.0}
"""Higher lower bounds; below, rotary frequencies grow to infinity."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
"""transformers' defaults, for settings absent from config.json."""


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """Sizes of a policy of any family; annotations are config.json's names."""

    num_layers: Annotated[int, "num_hidden_layers"]
    hidden: Annotated[int, "hidden_size"]
    """Width of the residual stream."""
    heads: Annotated[int, "num_attention_heads"]
    """Query heads."""
    kv_heads: Annotated[int, "num_key_value_heads"]
    """Key and value heads; each serves ``heads / kv_heads`` query heads."""
    head_dim: Annotated[int, "head_dim"]
    """Width of one head; heads · head_dim may differ from ``hidden``."""
    ffn: Annotated[int, "intermediate_size"]
    """Width of the feed-forward layer, or of each expert: outputs of the gate projection, equal to
    the up projection's."""
    vocab_size: Annotated[int, "vocab_size"]
    """Tokens, without padding."""
    tied: Annotated[bool, "tie_word_embeddings"]
    """Whether the output layer is the embedding."""
    rope_theta: Annotated[float, "rope_theta"]
    """Base of the rotary frequencies."""
    rms_eps: Annotated[float, "rms_norm_eps"]
    max_positions: Annotated[int, "max_position_embeddings"]
    """Longest sequence intended for the policy, in tokens."""
    architecture: str = "Qwen3ForCausalLM"
    """Key of :data:`families.FAMILIES`."""
    experts: int = 0
    """Experts in every layer; 0: a dense policy."""
    experts_per_token: int = 0
    shared_ffn: int = 0
    """Width of a layer's shared expert, which gets every token; 0: no shared expert."""
    renormalises_experts: bool = True
    """Whether the weights of a token's experts sum to one."""
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0
    """Fraction of each head with rotary positions."""
    attention_interval: int = 1
    """Period of attention layers; between are gated delta networks."""
    delta_keys: int = 0
    """Key heads of a gated delta network; each serves ``delta_values / delta_keys`` value heads."""
    delta_values: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_taps: int = 0
    """Tokens in a gated delta network's convolution window, with the current token."""

    @property
    def hybrid(self) -> bool:
        return self.attention_interval > 1

    @property
    def layer_types(self) -> list[str]:
        """Kinds of all layers, by config.json's names."""
        return _list_layer_types(self.num_layers, self.attention_interval)

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def extents(self) -> dict[str, int]:
        """Size of each dimension named in :data:`family.DIMENSIONS`."""
        return {
            "vocabulary": self.vocab_size,
            "hidden": self.hidden,
            "queries": self.heads * self.head_dim,
            "keys": self.kv_heads * self.head_dim,
            "head": self.head_dim,
            "experts": self.experts,
            "feed_forward": self.ffn,
            "shared_feed_forward": self.shared_ffn,
            "gated_queries": 2 * self.heads * self.head_dim,
            "delta_heads": self.delta_values,
            "delta_head": self.delta_value_dim,
            "delta_keys": (keys := self.delta_keys * self.delta_key_dim),
            "delta_values": (values := self.delta_values * self.delta_value_dim),
            "delta_mixed": 2 * keys + values,
            "delta_taps": self.delta_taps,
            "one": 1,
        }

    @property
    def routing(self) -> RoutingShape:
        """Shape and type of recorded expert choices."""
        return RoutingShape(self.num_layers, self.experts_per_token, self.experts)

    @property
    def config_sizes(self) -> dict[str, Any]:
        """Field values by config.json's names; ``|`` separates an earlier and a later name."""
        return {
            name: getattr(self, field) for field, name in (*KEYS.items(), *self.family.keys.items())
        }

    def as_config(self) -> dict[str, Any]:
        """Return the part of a config.json that :func:`read_shape` reads."""
        family = self.family
        scaling = self.rope_scaling
        return {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            **{name.partition(" | ")[0]: size for name, size in self.config_sizes.items()},
            "rope_scaling": scaling and {"rope_type": scaling.rope_type, **asdict(scaling)},
            **{name: values[0] for name, values in family.supported.items()},
        }


FIELDS = get_type_hints(PolicyShape, include_extras=True)
KEYS = {
    name: kind.__metadata__[0] for name, kind in FIELDS.items() if get_origin(kind) is Annotated
}
"""config.json's names of the fields shared by all families."""


def read_shape(path: str | Path) -> PolicyShape:
    """Return the shape described by ``config.json`` in a Hugging Face directory.

    Raises:
        UserError: on ``model.path``: the directory or the file is missing, or the model is of an
            unsupported kind.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        problem = "has no config.json" if Path(path).is_dir() else "is not a directory"
        made = "`megatron-dppo init` makes a fresh policy, and `megatron-dppo sft` warms it up"
        remedy = f"give the directory of a model, or its id on the hub; {made}"
        raise UserError("model.path", path, problem, remedy)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        problem = f"its config.json is not JSON ({error})"
        raise UserError("model.path", path, problem, "fetch the model again") from error
    if not isinstance(config, dict):
        raise UserError(
            "model.path", path, "its config.json is no JSON object", "fetch the model again"
        )
    try:
        return _parse_shape(path, config)
    except (KeyError, ValueError) as error:
        found = f"no {error}" if isinstance(error, KeyError) else error
        raise UserError(
            "model.path", path, f"its config.json has {found}", "fetch the model again"
        ) from error


def _parse_shape(path: str | Path, config: dict[str, Any]) -> PolicyShape:
    family = _parse_family(path, config)
    text = (
        {**config[family.text_config], "model_type": family.model_type}
        if family.text_config
        else {}
    )
    config = {**config, **text}
    rope = _parse_rope(path, config, family)
    heads = _parse_count(config, "num_attention_heads")
    absent = {
        "head_dim": _parse_count(config, "hidden_size") // heads,
        "num_key_value_heads": heads,
    }
    # Derive omitted sizes as transformers does.
    config |= {name: absent[name] for name in family.optional if config.get(name) is None}
    config |= {name: rope[name] for name in ROPE}
    if "attention_interval" in family.keys:
        config["full_attention_interval"] = _parse_attention_interval(config)
    scalings = {scaling.rope_type: scaling for scaling in family.rope_scalings}
    supported = {**family.supported, "rope_type": ("default", *scalings)}
    if "rotary_fraction" not in family.keys:
        supported["partial_rotary_factor"] = (1.0,)
    for name, values in supported.items():
        if (value := config.get(name, family.absent.get(name, values[0]))) not in values:
            possible = " or ".join(map(json.dumps, values))
            problem = (
                f"its config.json has {name} = {json.dumps(value):.60}, which is not supported"
            )
            raise UserError("model.path", path, problem, f"give a model whose {name} is {possible}")
    sizes = {
        field: _parse_value(config, name, FIELDS[field])
        for field, name in {**KEYS, **family.keys}.items()
    }
    if scaling := scalings.get(rope["rope_type"]):
        sizes["rope_scaling"] = scaling(
            **{each.name: _parse_number(each.name, rope[each.name]) for each in fields(scaling)}
        )
    shape = PolicyShape(**sizes, architecture=family.architecture)
    _check_sizes(shape)
    if shape.experts_per_token == 1 and shape.renormalises_experts:
        problem = (
            "it gives every token a single expert, always of weight one, which is not supported"
        )
        raise UserError(
            "model.path", path, problem, "give a model whose num_experts_per_tok is 2 or more"
        )
    return shape


def _list_layer_types(layers: int, interval: int) -> list[str]:
    types = ["linear_attention"] * layers
    for layer in range(interval - 1, layers, interval):
        types[layer] = "full_attention"
    return types


def _parse_attention_interval(config: dict[str, Any]) -> int:
    """Return the period of attention layers; absent: transformers' default."""
    config = {"full_attention_interval": 4, **config}
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds:
        config["full_attention_interval"] = kinds.index("full_attention") + 1
    interval = _parse_count(config, "full_attention_interval")
    layers = _parse_count(config, "num_hidden_layers")
    regular = _list_layer_types(layers, interval)
    if kinds not in (None, regular) or interval < 2 or interval > layers:
        given = f"full_attention_interval = {interval} and layer_types = {json.dumps(kinds):.60}"
        raise ValueError(f"{given}, which is no regular change of kinds")
    return interval


def _check_sizes(shape: PolicyShape) -> None:
    """Check that sizes are consistent.

    Raises:
        ValueError: a size does not fit another size.
    """
    fraction = shape.rotary_fraction
    chosen = shape.experts_per_token
    keys = shape.delta_keys
    # Rotary frequencies apply to pairs of features.
    turned = math.ceil(int(fraction * shape.head_dim) / 2) * 2
    for fits, problem in (
        (
            shape.heads % shape.kv_heads == 0,
            f"num_key_value_heads = {shape.kv_heads} for {shape.heads} query heads",
        ),
        (
            0 < turned <= shape.head_dim,
            f"partial_rotary_factor = {fraction:g} for head_dim = {shape.head_dim}",
        ),
        (chosen <= shape.experts, f"num_experts_per_tok = {chosen} for {shape.experts} experts"),
        (
            shape.delta_values % max(keys, 1) == 0,
            f"linear_num_key_heads = {keys} for {shape.delta_values} value heads",
        ),
    ):
        if not fits:
            raise ValueError(f"{problem}, which does not fit")


def _parse_value(config: dict[str, Any], name: str, annotation: Any) -> Any:
    """Return the value of a field with this annotation, under the latest name with a value."""
    first, *others = name.split(" | ")
    name = next((each for each in reversed(others) if config.get(each)), first)
    kind = getattr(annotation, "__origin__", annotation)
    if kind is bool:
        if not isinstance(value := config.get(name, False), bool):
            raise ValueError(f"{name} = {json.dumps(value):.60}, which is neither true nor false")
        return value
    return _parse_number(name, config[name]) if kind is float else _parse_count(config, name)


def _parse_count(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} = {json.dumps(value):.60}, which is no count")
    if value > (most := LARGEST.get(key, 10**9)):
        raise ValueError(f"{key} = {value:.6g}, which is more than {most:,}")
    return value


def _parse_number(key: str, value: Any) -> float:
    least = LEAST.get(key, FP32[0])
    most = FP32[1]
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(
            f"{key} = {json.dumps(value):.60}, which is no number from {least:.3g} to {most:.3g}"
        )
    return float(value)


def _parse_rope(path: str | Path, config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the settings of rotary positions, with transformers' defaults for absent settings.

    Transformers 5 writes ``rope_parameters``; earlier versions write ``rope_theta`` and
    ``rope_scaling``.

    Raises:
        UserError: config.json has two different objects; transformers reads ``rope_scaling`` only.
        ValueError: a setting has a wrong type.
    """
    defaults = {
        **ROPE,
        **({"partial_rotary_factor": 0.25} if "rotary_fraction" in family.keys else {}),
    }
    defaults |= {
        name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config
    }
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(
                f"{name} = {json.dumps(rope):.60}, which is no object of numbers for all layers"
            )
        # Earlier files have ``type`` for ``rope_type``.
        older = {"rope_type": rope["type"]} if "type" in rope else {}
        found += [{**defaults, **older, **rope, "type": ""}] if rope else []
    if found[1:] and found[0] != found[1]:
        problem = "its config.json has a rope_scaling and rope_parameters that differ"
        raise UserError("model.path", path, problem, "remove the wrong one")
    settings = found[0] if found else defaults
    section = settings.get("mrope_section", [0, 0, 0])
    if not isinstance(section, list) or [type(part) for part in section] != [int] * 3:
        raise ValueError(
            f"mrope_section = {json.dumps(section):.60}, which is no list of three counts"
        )
    return settings


def _parse_family(path: str | Path, config: dict[str, Any]) -> Family:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) for name in architectures
    ):
        raise ValueError(
            f"architectures = {json.dumps(architectures):.60}, which is no list of names"
        )
    if len(architectures) != 1 or architectures[0] not in FAMILIES:
        found = ", ".join(architectures) or config.get("model_type") or "of no named kind"
        known = " or ".join(FAMILIES)
        raise UserError(
            "model.path", path, f"holds a model that is {found}", f"give one that is {known}"
        )
    family = FAMILIES[architectures[0]]
    if (kind := config.get("model_type", family.model_type)) != family.model_type:
        problem = (
            f"its config.json says that {family.architecture} is of model_type "
            f"{json.dumps(kind):.60}"
        )
        raise UserError(
            "model.path", path, problem, f"set it to {family.model_type}, or fetch the model again"
        )
    return family


def check_megatron(shape: PolicyShape) -> None:
    """Check that the installed Megatron-Core can train the policy.

    Raises:
        UserError: Megatron-Core has no gated delta networks over packs.
    """
    installed = version("megatron-core")
    if shape.hybrid and tuple(map(int, installed.split(".")[:2])) < (0, 19):
        problem = (
            f"has gated delta networks, which Megatron-Core {installed} cannot train over packs"
        )
        remedy = (
            "install this project with Python 3.12 or later, for which there is Megatron-Core 0.19"
        )
        raise UserError("model.path", shape.architecture, problem, remedy)


def check_layout(shape: PolicyShape, layout: LayoutConfig) -> None:
    """Check that the layout can cut a policy of this shape; ``sequence_parallel`` without effect
    (at tp 1) is no error.

    Raises:
        UserError: names the setting and the valid values.
    """
    parts = {f"the {shape.kv_heads} key-value heads": shape.kv_heads}
    if not shape.experts:
        parts[f"the {shape.ffn} feed-forward units"] = shape.ffn
    if shape.shared_ffn:
        parts[f"the {shape.shared_ffn} units of the shared expert"] = shape.shared_ffn
    for part, size in parts.items():
        if size % layout.tp:
            possible = _list_divisors(math.gcd(*parts.values()))
            raise UserError(
                "layout.tp", layout.tp, f"does not divide {part}", f"set it to one of {possible}"
            )
    if shape.hybrid and shape.delta_keys % (layout.tp * layout.cp):
        problem = (
            f"times layout.tp = {layout.tp} does not divide the {shape.delta_keys} key heads of "
            "delta networks"
        )
        remedy = (
            "set layout.tp and layout.cp so that their product is one of "
            f"{_list_divisors(shape.delta_keys)}"
        )
        raise UserError("layout.cp", layout.cp, problem, remedy)
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
                raise UserError(
                    f"layout.{name}", value, problem, "leave it out, or set layout.pp to 2 or more"
                )
    if _is_valid_split(layers, layout):
        return
    given = "".join(f", layout.{name} = {value}" for name, value in uneven.items())
    if layout.vpp > 1:
        given += f", layout.vpp = {layout.vpp}"
    condition = f" (with{given[1:]})" if given else ""
    problem = f"does not cut the {layers} layers into equal stages{condition}"
    # pp = 1 excludes uneven and virtual stages.
    least = 2 if uneven or layout.vpp > 1 else 1
    possible = [
        pp for pp in range(least, layers + 1) if _is_valid_split(layers, with_values(layout, pp=pp))
    ]
    remedies = [f"set it to one of {', '.join(map(str, possible))}"] if possible else []
    if layout.vpp > 1:
        possible = [
            vpp
            for vpp in range(1, layers + 1)
            if _is_valid_split(layers, with_values(layout, vpp=vpp))
        ]
        if possible:
            remedies.append(f"set layout.vpp to one of {', '.join(map(str, possible))}")
    if uneven:
        remedies.append("leave " + " and ".join(f"layout.{name}" for name in uneven) + " out")
    raise UserError("layout.pp", layout.pp, problem, ", or ".join(remedies))


def _is_valid_split(layers: int, layout: LayoutConfig) -> bool:
    if layout.pp * layout.vpp > layers:
        return False
    # Megatron would divide by the number of middle stages, which is 0 here.
    if layout.pp == 2 and layout.vpp > 1 and layout.first_stage_layers and layout.last_stage_layers:
        return False
    try:
        return all(list_stage_layers(layers, stage, layout)[0] for stage in range(layout.pp))
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
        raise UserError(
            "layout.ep", layout.ep, problem, f"set it to one of {_list_divisors(shape.experts)}"
        )
    if shape.ffn % layout.expert_tp:
        name = "etp" if layout.etp else "tp"
        problem = f"does not divide the {shape.ffn} units of an expert"
        remedy = f"set layout.etp to one of {_list_divisors(shape.ffn)}"
        raise UserError(f"layout.{name}", layout.expert_tp, problem, remedy)
    ranks = layout.expert_tp * layout.ep
    if max(ranks, layout.tp) % min(ranks, layout.tp):
        problem = (
            f"times layout.etp = {layout.expert_tp} neither divides layout.tp = {layout.tp} "
            "nor is a multiple of it"
        )
        sizes = [etp for etp in range(1, shape.ffn + 1) if shape.ffn % etp == 0]
        possible = [
            etp
            for etp in sizes
            if max(etp * layout.ep, layout.tp) % min(etp * layout.ep, layout.tp) == 0
        ]
        listed = ", ".join(map(str, possible[:6]))
        remedy = (
            f"set layout.etp to one of {listed}"
            if possible
            else "set it to a multiple or a divisor of layout.tp"
        )
        raise UserError("layout.ep", layout.ep, problem, remedy)
    if layout.tp > 1 and not layout.sequence_parallel:
        problem = (
            f"Megatron trains experts with layout.tp = {layout.tp} under sequence parallelism only"
        )
        raise UserError("layout.sequence_parallel", "false", problem, "set it to true")


def _list_divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Return the rows of embedding and output layer over all ranks: a multiple of ``tp``, and of
    128 as required by kernels."""
    # The same for every tp that divides 128, so that a checkpoint fits all these layouts.
    unit = math.lcm(128, tp)
    return (vocab_size + unit - 1) // unit * unit


PUBLISHED = {
    name: PolicyShape(**sizes, architecture=family.architecture)
    for family in FAMILIES.values()
    for name, sizes in family.published.items()
}
"""Sizes of the published models, by lower-case name."""
VARIANTS = ("-fp8", "-base", "-instruct-2507", "-thinking-2507", "-instruct", "-thinking")


def match_published_model(path: str) -> str | None:
    """Return the key in ``PUBLISHED`` for a path or hub id, or None."""
    name = Path(path).name.lower()
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return name if name in PUBLISHED else None
