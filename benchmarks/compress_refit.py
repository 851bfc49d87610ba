"""What ``megatron-dppo compress --refit`` is worth, beside other things that stand in for layers that go.

    python benchmarks/compress_refit.py [--json] [--seeds 3] [--layers 4] [--keep 0.75 0.5] [--steps 300] [--tiny]
                                        [--scores shapley-loss influence random] [--methods width:activation …]
                                        [--recover 19 38] [--lr 0.003 0.0005] [--ridges 1e-3] [--fit-on 256]
                                        [--out DIR]

Policies and sequences are those of ``benchmarks/compress.py``, with whose ``--out`` they are not made again. Losses are
of other sequences than those that all else is fitted on. In ``layers`` they go by ``--method depth``, for each seed,
share and score. u is what the layers of a run added, x the residual stream before it:

- ``none``: nothing stands in for them.
- ``bias``: x + ⟨u⟩. ``rank 4``, ``rank 16``, ``map``: x + ⟨u⟩ + A (x − ⟨x⟩), A of that rank or full, by least squares
  (2407.16286). A Qwen3 has no weight for them, but for a map right behind the embedding.
- ``value bias before``, ``behind``: the bias of the value projection in the layer before or behind whose effect is
  closest to ⟨u⟩, since attention weights sum to 1. ``representable`` is the share of ‖⟨u⟩‖ that it has.
- ``output before``: the down projection of the layer before is multiplied by a map of its output (ReplaceMe,
  2505.02819). ``units before``: it is refitted, as ``--refit`` does, by the activations of its units.
- ``refit``: ``--refit``, which fits all layers that follow, too.

Where a run has no layer before it, or behind it, nothing stands in for it. ``over_none`` is the mean over seeds of the
loss over that with ``none``. ``methods`` has losses of other methods, without and with ``--refit``. With ``--recover``
two policies of each seed, without and with it, are trained on by ``sft`` for so many steps with each ``--lr``;
``recovered`` has their loss and held-out accuracy. With ``--ridges`` the same two are fitted with each of them, on so
many of the sequences as ``--fit-on`` says: ``ridges``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from compress import SUMS, accuracy, init, run, sft, write_calibration

from megatron_dppo.compress.absence import as_cut, mean_loss
from megatron_dppo.compress.calibration import Batch, batches, draw, read_sequences
from megatron_dppo.compress.choose import Recipe, choose
from megatron_dppo.compress.command import load_whole
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.reader import Whole
from megatron_dppo.compress.refit import Refit, watched
from megatron_dppo.config import ArithmeticConfig
from megatron_dppo.data.generators import Sum, make_sums
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.models.shape import PolicyShape, read_shape

SIDES = "before", "behind"
RECOVERED = ("depth", "shapley-loss", 0.75), ("width", "activation", 0.5)
METHODS = "width:activation", "width:magnitude", "width:random", "2ssp:activation", "hidden:activation"
RANKS = {"bias": 0, "rank 4": 4, "rank 16": 16, "map": 10**9}
SEQUENCES = 256


def measure() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    for name, default in ("seeds", 3), ("layers", 4), ("hidden", 128), ("steps", 300), ("problems", 200):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.75, 0.5])
    parser.add_argument("--scores", nargs="+", default=["shapley-loss", "influence", "random"])
    parser.add_argument("--methods", nargs="+", default=[*METHODS, "minitron:activation"], metavar="METHOD:SCORE")
    parser.add_argument("--recover", type=int, nargs="*", default=[], metavar="STEPS")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3, 5e-4])
    parser.add_argument("--ridges", type=float, nargs="*", default=[])
    parser.add_argument("--fit-on", type=int, nargs="+", default=[SEQUENCES], metavar="SEQUENCES")
    parser.add_argument("--out", type=Path, help="where policies and runs are kept, and not made again")
    parser.add_argument("--tiny", action="store_true", help="see whether it runs: its figures mean nothing")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.seeds, arguments.layers, arguments.hidden, arguments.steps, arguments.problems = 1, 4, 64, 2, 8
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"layers": [], "methods": [], "recovered": [], "ridges": []}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(1, arguments.seeds + 1):
            for part, row in of_seed((arguments.out or Path(name)) / str(seed), arguments, seed):
                figures[part].append({"seed": seed, **row})
                print(part, json.dumps(figures[part][-1]), file=sys.stderr, flush=True)
    figures["over_none"] = over_none(figures["layers"])
    if not arguments.json:
        for place, ratios in figures["over_none"].items():
            print(place, {name: round(ratio, 2) for name, ratio in ratios.items()})
    print(json.dumps(figures))


def of_seed(folder: Path, arguments: argparse.Namespace, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a policy, each with the part that it is of."""
    folder.mkdir(parents=True, exist_ok=True)
    trained, held_out = make_sums(ArithmeticConfig(**SUMS, eval_problems=arguments.problems, seed=seed))
    write_calibration(folder / "calibration.jsonl", trained)
    init(folder / "fresh", arguments.hidden, arguments.layers, 2 * arguments.hidden, seed)
    sft(folder / "fresh", folder / "whole", arguments.steps, seed)
    shape = read_shape(folder / "whole")
    model = load_whole(folder / "whole", shape, torch.float32)
    columns = {"prompt_key": "prompt", "response_key": "response", "chat_template": False}
    answers = read_sequences(folder / "calibration.jsonl", load_tokenizer(folder / "whole"), **columns)
    scored, unseen = draw(answers, SEQUENCES, seed)
    fitted_on, others = read(scored), read(unseen)
    before = mean_loss(model, others)
    for keep in arguments.keep:
        for score in arguments.scores:
            recipe = Recipe("depth", score, keep, seed=seed)
            cut = choose(Whole(model, shape, fitted_on), shape, recipe, say=lambda _: None)
            trial = Trial(model, shape, cut, fitted_on)
            row = {"keep": keep, "score": score, "gone": trial.runs, "whole": before}
            yield "layers", row | {"losses": trial.losses(others), "representable": trial.representable}
        for method in arguments.methods:
            record = json.loads((smaller(folder, *method.split(":"), keep, seed) / "compress.json").read_text())
            names = "method", "score", "keep", "loss_before", "loss_after", "loss_without_refit"
            yield "methods", {name: record[name] for name in names}
    for method, score, keep in RECOVERED if arguments.ridges else ():
        recipe = Recipe(method, score, keep, multiple=8, seed=seed)
        cut = choose(Whole(model, shape, fitted_on), shape, recipe, say=lambda _: None)
        for count, ridge in product(arguments.fit_on, arguments.ridges):
            few = read(scored[:count])
            refit = Refit(model, shape, few, torch.float32, ridge)
            refit.fit(cut, say=lambda _: None)
            tokens = sum(int(batch.valid.sum()) for batch in few)
            with as_cut(model, cut), torch.no_grad():
                row = {"sequences": count, "tokens": tokens, "ridge": ridge, "without": mean_loss(model, others)}
                with refit.applied():
                    yield "ridges", {"method": method, "keep": keep, **row, "loss": mean_loss(model, others)}
    for method, score, keep in RECOVERED if arguments.recover else ():
        for refit in (False, True):
            small = smaller(folder, method, score, keep, seed, refit=refit)
            for point in recovered(small, arguments, seed, held_out, others):
                yield "recovered", {"method": method, "keep": keep, "refit": refit, **point}


def read(answers: Sequence[WorkedAnswer]) -> list[Batch]:
    return list(batches(answers, max_tokens=2048, device=torch.device("cpu")))


def smaller(folder: Path, method: str, score: str, keep: float, seed: int, *, refit: bool = True) -> Path:
    out = folder / (f"{method}:{score}-{keep:g}" + "-refit" * refit)
    options = ["--refit"] * refit + ["--zero-attention"] * (method == "2ssp")
    if not out.exists():
        run("compress", folder / "whole", out, "--keep", keep, "--method", method, "--score", score, "--multiple", 8,
            "--seed", seed, "--calibrate", folder / "calibration.jsonl", *options)  # fmt: skip
    return out


@dataclass
class Trial:
    """A policy without some layers, and what stands in for them."""

    model: Any
    shape: PolicyShape
    cut: Cut
    fitted_on: Sequence[Batch]

    def __post_init__(self) -> None:
        self.representable: dict[str, list[float]] = {}
        gone = sorted(set(range(self.shape.num_layers)) - set(self.cut.layers))
        ends = [layer for layer in gone if layer + 1 not in gone]
        self.runs = list(zip([layer for layer in gone if layer - 1 not in gone], ends, strict=True))

    @torch.no_grad()
    def losses(self, others: Sequence[Batch]) -> dict[str, float]:
        found, streams = {}, self._streams()
        ways: dict[str, Callable[[ExitStack], None]] = {"none": lambda _: None}
        ways |= {name: partial(self._add, streams=streams, rank=rank) for name, rank in RANKS.items()}
        ways |= {f"value bias {side}": partial(self._value_bias, streams=streams, side=side) for side in SIDES}
        for name, stand_in in ways.items():
            with ExitStack() as stack:
                stack.enter_context(as_cut(self.model, self.cut))
                stand_in(stack)
                found[name] = mean_loss(self.model, others)
        for name, kind in ("output before", OutputRefit), ("units before", Refit), ("refit", Refit):
            refit = kind(self.model, self.shape, self.fitted_on, torch.float32)
            if name == "refit":
                refit.fit(self.cut, say=lambda _: None)
            else:
                for first, last in self.runs:
                    if first:
                        refit.fit_layer(self.cut, first - 1, last)
            with as_cut(self.model, self.cut), refit.applied():
                found[name] = mean_loss(self.model, others)
        return found

    def _streams(self) -> list[torch.Tensor]:
        """[tokens, hidden] fp64 of the larger policy: before each layer, and behind the last."""
        streams: list[list[torch.Tensor]] = [[] for _ in range(self.shape.num_layers + 1)]
        for batch in self.fitted_on:
            with ExitStack() as stack:
                given = stack.enter_context(watched(self.model.model.layers[0], inputs=True))
                outputs = [stack.enter_context(watched(layer)) for layer in self.model.model.layers]
                self.model.model(batch.tokens, use_cache=False)
                for stream, (seen,) in zip(streams, [given, *outputs], strict=True):
                    stream.append(seen[batch.valid].double())
        return [torch.cat(stream) for stream in streams]

    def _add(self, stack: ExitStack, streams: list[torch.Tensor], rank: int) -> None:
        """At the place of each run: its mean update, and a linear map of so low a rank; of none with 0."""
        for first, last in self.runs:
            center = streams[first].mean(0)
            update = streams[last + 1] - streams[first]
            bias = update.mean(0)
            change = torch.zeros(self.shape.hidden, self.shape.hidden, dtype=torch.float64)
            if rank:
                inputs = streams[first] - center
                whole = torch.linalg.lstsq(inputs, update - bias).solution
                kept = torch.linalg.svd(inputs @ whole, full_matrices=False).Vh[:rank]
                change = whole @ kept.T @ kept

            hook = partial(_mapped, center, change, bias)
            stack.callback(self.model.model.layers[first].register_forward_hook(hook).remove)

    def _value_bias(self, stack: ExitStack, streams: list[torch.Tensor], side: str) -> None:
        self.representable[side] = []
        for first, last in self.runs:
            number = first - 1 if side == "before" else last + 1
            attention = self.model.model.layers[number].self_attn if 0 <= number < self.shape.num_layers else None
            if attention is None or attention.v_proj.bias is not None:
                continue
            heads = attention.o_proj.weight.double().unflatten(1, (self.shape.kv_heads, -1, self.shape.head_dim))
            effect = heads.sum(2).flatten(1)  # query heads that share a value add up
            mean_update = (streams[last + 1] - streams[first]).mean(0)
            bias = torch.linalg.lstsq(effect, mean_update[:, None]).solution[:, 0]
            self.representable[side].append(float((effect @ bias).norm() / mean_update.norm()))
            attention.v_proj.bias = torch.nn.Parameter(bias.float(), requires_grad=False)
            stack.callback(setattr, attention.v_proj, "bias", None)


def _mapped(center: torch.Tensor, change: torch.Tensor, bias: torch.Tensor, _: Any, __: Any, x: torch.Tensor) -> Any:
    return x + (bias + (x.double() - center) @ change).to(x.dtype)


class OutputRefit(Refit):
    """ReplaceMe's own: a map of the output of the feed-forward before a run."""

    of_output = True


def recovered(
    small: Path, arguments: argparse.Namespace, seed: int, held_out: list[Sum], others: Sequence[Batch]
) -> Iterator[dict[str, float]]:
    """Loss and accuracy of a smaller policy, as it is and after each number of steps with each learning rate."""
    for steps, lr in [(0, 0.0), *((steps, lr) for steps in arguments.recover for lr in arguments.lr)]:
        out = small.with_name(f"{small.name}-{steps}-{lr:g}") if steps else small
        tokens = sft(small, out, steps, seed, lr=lr) if steps else 0.0
        loss = mean_loss(load_whole(out, read_shape(out), torch.float32), others)
        yield {"steps": steps, "lr": lr, "tokens": tokens, "loss": loss, "accuracy": accuracy(out, held_out)}


def over_none(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean over seeds of each loss over that with nothing, by share and score."""
    places: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        ratios = {name: loss / row["losses"]["none"] for name, loss in row["losses"].items()}
        places.setdefault(f"{row['keep']:g} {row['score']}", []).append(ratios)
    return {place: {name: mean(each[name] for each in of) for name in of[0]} for place, of in places.items()}


if __name__ == "__main__":
    measure()
