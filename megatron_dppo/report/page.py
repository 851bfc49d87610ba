"""The report: one HTML file with everything in it, which asks no network and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from megatron_dppo import __version__
from megatron_dppo.errors import UserError
from megatron_dppo.observe.palette import css
from megatron_dppo.process.files import replacing_file
from megatron_dppo.report.cost import cost
from megatron_dppo.report.evaluations import benchmarks, sample_answers
from megatron_dppo.report.headline import headline
from megatron_dppo.report.learning import learning, packs, signs
from megatron_dppo.report.options import options
from megatron_dppo.report.pruning import pruning
from megatron_dppo.report.run import Run, read_runs
from megatron_dppo.report.timing import race, timing


def report(folders: Sequence[Path], out: Path, *, png: Path | None = None, price: float | None = None) -> None:
    """``megatron-dppo report``: write the page, in one piece, and the pictures if a folder for them is given.

    Args:
        folders: of the runs.
        out: the HTML file.
        png: folder for ``<run>-progress.png`` and ``<run>-pruning.png``.
        price: of one GPU for one hour; None: each run's ``cluster.price_per_gpu_hour``.

    Raises:
        UserError: for a folder that is none of a run, and for a page that is a folder.
    """
    if out.is_dir():
        raise UserError("--out", out, "is a folder", "Name a file in it, report.html perhaps")
    runs = read_runs(folders)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(out) as partial:
        # An answer may hold half of a surrogate pair, which UTF-8 has no bytes for.
        partial.write_text(page(runs, price), encoding="utf-8", errors="replace")
    print(f"report               {out}")
    if png is not None:
        from megatron_dppo.report.pictures import draw_pictures

        png.mkdir(parents=True, exist_ok=True)
        for run in runs:
            draw_pictures(run, png, prefix=f"{run.name.replace('/', '-')}-", title=run.name)
        print(f"pictures             {png}")


def page(runs: Sequence[Run], price: float | None = None) -> str:
    """The page's text."""
    sections = [
        learning(runs), timing(runs), pruning(runs), packs(runs), signs(runs), sample_answers(runs), benchmarks(runs),
        cost(runs, price), options(runs),
    ]  # fmt: skip
    folder = files(__package__)
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("style.css", "page.js"))
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html").render(
        runs=runs,
        headlines=[headline(run) for run in runs],
        outcome=race(runs),
        sections=sections,
        palette=Markup(css()),
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        now=f"{datetime.now():%Y-%m-%d %H:%M}",
    )
