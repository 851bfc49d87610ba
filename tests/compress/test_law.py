"""The law of recovery: curves made with known coefficients give them back, and it is judged by what it has not seen."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.cli import main
from megatron_dppo.compress.job import RECORD
from megatron_dppo.compress.law import (
    COLUMNS,
    FORMS,
    Points,
    bootstrap,
    fit,
    held_out,
    held_out_error,
    interval,
    losses,
    read_curves,
    slope_difference,
    tokens_to,
)
from megatron_dppo.observe.metrics import StepLog
from megatron_dppo.trainer.resume import WARM_UP

TRUE = {"N_C": 4e3, "D_C": 3e3, "E": 0.4, "alpha": 0.5, "beta": 0.4, "gamma": -1.2, "delta": 0.1}
"""Ours, and no one's measurement."""


def curves(form: str = "p2", *, noise: float = 0.0) -> Points:
    """Twenty of twelve points."""
    grid = [
        (size, rate, tokens, number)
        for number, (size, rate) in enumerate((s, r) for s in np.geomspace(5e6, 2e9, 5) for r in (0.1, 0.2, 0.35, 0.5))
        for tokens in np.geomspace(1e5, 1e9, 12)
    ]
    size, rate, tokens, number = (np.array(column) for column in zip(*grid, strict=True))
    points = Points(size, rate, tokens, np.ones(len(size)), 3.5 - 0.2 * np.log10(size), number)
    exact = losses(FORMS[form], TRUE, points)
    return replace(points, loss=exact * np.exp(noise * np.random.default_rng(5).standard_normal(len(size))))


def written_out(size: float, rate: float, tokens: float, whole: float) -> float:
    shared = (1 / rate) ** TRUE["gamma"] * (1 / size) ** TRUE["delta"]
    return whole + shared * (TRUE["N_C"] / size ** TRUE["alpha"] + TRUE["D_C"] / tokens ** TRUE["beta"] + TRUE["E"])


def test_the_law_is_the_published_formula() -> None:
    points = curves()
    rows = zip(points.size, points.rate, points.tokens, points.whole, strict=True)
    np.testing.assert_allclose(points.loss, [written_out(*row) for row in rows], rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_curves_give_back_the_coefficients_that_made_them(form: str) -> None:
    found = fit(FORMS[form], curves(form), seed=1)
    assert found == pytest.approx({name: TRUE[name] for name in found}, rel=1e-3)


def test_noise_and_wild_points_leave_coefficients_within_a_tenth() -> None:
    points = curves(noise=5e-4)
    wild = points.loss.copy()
    wild[::40] *= 1.3
    found = fit(FORMS["p2"], replace(points, loss=wild), seed=1)
    assert found == pytest.approx(TRUE, rel=0.1)


def test_intervals_hold_the_coefficients_and_grow_with_the_noise() -> None:
    widths = []
    for noise in (1e-3, 1e-2):
        points = curves("p2-one-size", noise=noise)
        form = FORMS["p2-one-size"]
        drawn = bootstrap(form, points, fit(form, points, seed=1), draws=50, seed=2)
        bounds = {name: interval([each[name] for each in drawn]) for name in ("gamma", "beta")}
        assert all(low < TRUE[name] < high for name, (low, high) in bounds.items())
        widths.append(bounds["beta"][1] - bounds["beta"][0])
    assert widths[1] > 3 * widths[0]


def test_slopes_apart_are_differences_within_each_curve() -> None:
    points, form = curves(noise=0.01), FORMS["p2"]
    predicted, apart = losses(form, TRUE, points), []
    for number in range(20):
        for i in range(12 * number, 12 * number + 11):
            run = points.tokens[i + 1] - points.tokens[i]
            apart.append(abs((predicted[i + 1] - predicted[i]) / run - (points.loss[i + 1] - points.loss[i]) / run))
    shuffled = points.take(np.random.default_rng(1).permutation(len(points)))
    assert slope_difference(form, TRUE, shuffled) == pytest.approx(np.mean(apart), rel=1e-9)


@pytest.mark.parametrize("what", ["N0", "rho", "D"])
def test_what_is_held_out_is_not_seen_and_the_law_foretells_it_better_than_a_power_law(what: str) -> None:
    points = curves(noise=1e-3)
    held = held_out(points)[what]
    doubled = replace(points, loss=np.where(held, 2 * points.loss, points.loss))
    errors = {
        name: held_out_error(FORMS[name], of, held, draws=5, seed=1)["error"]
        for name, of in (("p2", points), ("power", points))
    }
    assert errors["p2"] < 0.003 < errors["power"]
    unseen = held_out_error(FORMS["p2"], doubled, held, draws=5, seed=1)
    assert unseen["error"] == pytest.approx(np.log(2), abs=0.01), "the fit does not know of it"


def test_the_largest_are_held_out() -> None:
    points = curves()
    held = held_out(points)
    assert set(points.size[held["N0"]]) == {points.size.max()} and 2e9 not in points.size[~held["N0"]]
    assert set(points.rate[held["rho"]]) == {0.5} and 0.5 not in points.rate[~held["rho"]]
    assert points.tokens[~held["D"]].max() <= 0.5e9 < points.tokens[held["D"]].min()


def test_tokens_to_a_loss_are_those_that_give_it() -> None:
    points = curves()
    for name, form in FORMS.items():
        np.testing.assert_allclose(tokens_to(form, TRUE, curves(name)), points.tokens, rtol=1e-6)
    never = replace(points, loss=points.whole)
    assert np.isinf(tokens_to(FORMS["p2"], TRUE, never)).all()


def write(points: Points, file: Path) -> Path:
    table = zip(points.size, points.rate, points.tokens, points.loss, points.whole, strict=True)
    rows = [dict(zip(COLUMNS, map(float, row), strict=True)) for row in table]
    with file.open("w", newline="") as text:
        if file.suffix == ".csv":
            writer = csv.DictWriter(text, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        else:
            text.writelines(json.dumps(row) + "\n" for row in rows)
    return file


def test_a_law_is_fitted_to_files_and_foretells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = curves()
    csv_file = write(points.take(points.curve < 10), tmp_path / "a.csv")
    jsonl = write(points.take(points.curve >= 10), tmp_path / "b.jsonl")
    law = tmp_path / "law.json"
    assert main(["compress", "fit", str(csv_file), str(jsonl), "--out", str(law), "--draws", "5"]) == 0
    found = json.loads(law.read_text())
    assert (found["form"], found["points"], found["curves"]) == ("p2", 240, 20)
    assert found["coefficients"] == pytest.approx(TRUE, rel=1e-3)
    capsys.readouterr()
    size, whole = 1e8, 1.9
    target = written_out(size, 0.4, 1e8, whole)
    words = ["--size", str(size), "--whole-loss", str(whole), "--tokens", "1e8", "--to", str(target), "--json"]
    rates = ["--rates", "0.25", "0.4", "0.8", "--run-tokens", "1e8"]
    assert main(["compress", "predict", str(law), *words, *rates]) == 0
    said = json.loads(capsys.readouterr().out)
    expected = [written_out(size, rate, 1e8, whole) for rate in (0.25, 0.4, 0.8)]
    assert [of["value"] for of in said["loss"]] == pytest.approx(expected, rel=1e-6)
    assert [of["value"] for of in said["loss_at_last"]] == pytest.approx(
        [written_out(size, rate, 1e300, whole) for rate in (0.25, 0.4, 0.8)], rel=1e-6
    )
    assert said["tokens"][1]["value"] == pytest.approx(1e8, rel=1e-3)
    assert said["highest_rate"]["value"] in (0.39, 0.4)
    exact = [tokens_to(FORMS["p2"], TRUE, of)[0] for of in (one(size, r / 100, target, whole) for r in range(1, 51))]
    times = [(1 - r / 100) * (1 + tokens / 1e8) for r, tokens in enumerate(exact, 1)]
    assert said["cheapest_rate"]["value"] == (1 + int(np.argmin(times))) / 100
    assert said["least_time"]["value"] == pytest.approx(min(times), rel=1e-3)
    assert said["beyond"] == ["rate 0.8 lies outside the curves' 0.1 to 0.5"]


def one(size: float, rate: float, loss: float, whole: float) -> Points:
    return Points(*(np.array([value]) for value in (size, rate, 1.0, loss, whole, 0)))


def test_a_recovery_s_own_losses_are_a_curve(tmp_path: Path) -> None:
    small, out, run = tmp_path / "small", tmp_path / "out", tmp_path / "run"
    small.mkdir(), out.mkdir()
    (small / RECORD).write_text(json.dumps({"weights_before": 1000, "weights_after": 750, "loss_before": 0.5}))
    (out / WARM_UP).write_text(json.dumps({"model.path": str(small), "run.dir": str(run)}))
    log = StepLog(run / "sft-log" / "metrics.jsonl", -1)
    for step in range(1, 65):
        log.write(step, {"train/tokens": 10.0, "train/loss": 1 + 1 / step})
    log.close()
    points = read_curves([out])
    assert (set(points.size), set(points.rate), set(points.whole), set(points.curve)) == ({1000}, {0.25}, {0.5}, {0})
    assert np.all(np.diff(points.tokens) > 0) and points.tokens[-1] > 500
    last = np.arange(64)[np.cumsum([10.0] * 64) >= 20 * 32 ** (11 / 12)] + 1
    assert points.loss[-1] == pytest.approx(np.mean(1 + 1 / last))
    assert points.tokens[-1] == pytest.approx(np.mean(10 * last))


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        ("size,rate,tokens,loss\n1,0.5,1,1\n", [], "has no whole_loss"),
        ("size,rate,tokens,loss,whole_loss\n1,25,1,1,1\n", [], "row 1"),
        ("size,rate,tokens,loss,whole_loss\n1,0.5,1,x,1\n", [], "'x' as loss"),
        ("size,rate,tokens,loss,whole_loss\n1,0.5,1,2,1\n", [], "2 values of rho"),
        ("", ["--form", "p2"], "holds no rows"),
    ],
)
def test_points_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], named: str
) -> None:
    (tmp_path / "a.csv").write_text(text)
    out = tmp_path / "law.json"
    assert main(["compress", "fit", str(tmp_path / "a.csv"), "--out", str(out), *words]) == 2
    assert named in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_what_is_no_law_or_no_rate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "law.json").write_text("{}")
    command = [
        "compress",
        "predict",
        str(tmp_path / "law.json"),
        "--size",
        "1e6",
        "--whole-loss",
        "1",
        "--tokens",
        "1e6",
    ]
    for words, named in (([], "LAW"), (["--rates", "25"], "--rates"), (["--run-tokens", "5"], "--run-tokens")):
        assert main([*command, *words]) == 2
        assert named in capsys.readouterr().err
    assert main(["compress", "fit", str(tmp_path), "--out", str(tmp_path / "law.json")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["compress", "fit", str(tmp_path), "--out", str(tmp_path / "new.json")]) == 2
    assert "sft.out" in capsys.readouterr().err
