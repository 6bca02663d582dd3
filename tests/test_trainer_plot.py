"""Pictures of runs, and what the command says of wrong arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from fused_grpo import cli
from fused_grpo.trainer import plot
from fused_grpo.trainer.models import MissingExtraError
from fused_grpo.trainer.plot import draw, load
from fused_grpo.trainer.records import JsonLines

PNG = b"\x89PNG"


def run(folder: Path, slope: float = 0.1, **more: float) -> Path:
    """A folder with the metrics of ten steps and two evaluations."""
    entries: list[dict[str, Any]] = [{"step": 0, "eval_reward": 0.0}]
    for step in range(1, 11):
        kl = None if step % 2 else 0.01 * step
        entries.append({"step": step, "reward": slope * step, "loss": 0.5, "kl": kl, **more})
    entries.append({"step": 10, "eval_reward": 0.9, "train_runtime": 3.0})
    JsonLines(folder / "metrics.jsonl").append(entries)
    return folder


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Those that are saved meanwhile."""
    saved: list[Figure] = []
    original = Figure.savefig

    def keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        saved.append(figure)
        original(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def lines(figure: Figure, title: str) -> list[tuple[list[float], list[float]]]:
    (axes,) = [axes for axes in figure.axes if axes.get_title() == title]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


def test_one_run_is_drawn_in_its_folder(
    tmp_path: Path, figures: list[Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plot", str(run(tmp_path / "a"))]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a" / "metrics.png")
    assert (tmp_path / "a" / "metrics.png").read_bytes().startswith(PNG)
    (figure,) = figures
    training, evaluated = lines(figure, "reward")
    assert training[0] == list(range(1, 11))
    assert training[1] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert evaluated == ([0, 10], [0.0, 0.9])
    ((steps, values),) = lines(figure, "KL to the reference (nats)")
    assert steps == [2, 4, 6, 8, 10]
    assert values == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.10])
    (entropy,) = [axes for axes in figure.axes if axes.get_title() == "entropy (nats)"]
    assert [text.get_text() for text in entropy.texts] == ["not measured"]


def test_runs_are_compared_with_one_entry_each(
    tmp_path: Path, figures: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "x" / "same")
    run(tmp_path / "y" / "same", 0.2)
    run(tmp_path / "other", 0.3)
    (tmp_path / "other" / "metrics.jsonl").rename(tmp_path / "third.jsonl")
    assert cli.main(["plot", "x/same", "y/same/metrics.jsonl", "third.jsonl"]) == 0
    assert Path("comparison.png").read_bytes().startswith(PNG)
    (figure,) = figures
    (axes,) = [axes for axes in figure.axes if axes.get_title() == "reward"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["x/same/metrics.jsonl", "y/same/metrics.jsonl", "third"]
    colors = [line.get_color() for line in axes.lines]
    assert colors == ["C0", "C0", "C1", "C1", "C2", "C2"], "training and held-out share a colour"
    ends = [line.get_ydata()[-1] for line in axes.lines[::2]]
    assert ends == pytest.approx([1.0, 2.0, 3.0])


def test_chosen_metrics_smoothed(tmp_path: Path, figures: list[Figure]) -> None:
    out = tmp_path / "new" / "p.svg"
    run(tmp_path / "a", more=7.0)
    arguments = ["--metrics", "reward", "more", "eval_reward", "--smooth", "4", "--out", str(out)]
    assert cli.main(["plot", str(tmp_path / "a"), *arguments]) == 0
    assert "<svg" in out.read_text()
    (figure,) = figures
    shown = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert shown == ["reward", "more", "eval_reward"]
    raw, smooth = lines(figure, "reward")
    assert raw[1] == pytest.approx([0.1 * step for step in range(1, 11)])
    means = [0.1, 0.15, 0.2, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85]
    assert smooth[1] == pytest.approx(means)


def test_a_torn_file_and_a_resumed_order_can_be_drawn(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward": 0.7}\n{"step": 11, "rew')
    (loaded,) = load([folder])
    steps, _ = loaded.points("reward")
    assert steps == sorted(steps)
    assert len(steps) == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "there is no missing: give folders of runs"),
        (["empty"], "there is no empty/metrics.jsonl"),
        (["hollow"], "hollow/metrics.jsonl holds no logs"),
        (["a", "--metrics", "reward", "rewrad"], "no run has a metric 'rewrad'; there are eval_"),
        (["a", "--metrics", "step"], "no run has a metric 'step'"),
        (["a", "--smooth", "0"], "smooth=0 must be at least 1"),
        (["a", "--out", "p.doc"], "out='p.doc' must end in one of ."),
        (["a", "--beta", "1"], "plot does not know --beta 1"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "metrics.jsonl").write_text("not JSON\n")
    assert cli.main(["plot", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("*.p*"))


def test_matplotlib_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = load([run(tmp_path / "a")])
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="matplotlib"):
        draw(runs, tmp_path / "p.png")
