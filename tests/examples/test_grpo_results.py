"""Tests the results of examples/grpo: the files, the comparison, the tables and the picture."""

import os
import sys

import pytest

pytest.importorskip("torch")


def test_differing_runs_are_distinguished(example, tmp_path, capsys):
    results, compare = example("results"), example("compare")
    step = results.Step(0.5, 0.25, 0.1, 1.0, 1e-7, "ab", {})
    first = results.Results({"sleep": True, "seed": 0}, "CPU", 1, 0, [step], "cd")
    for change, said in (
        ({"weights": "ce"}, "weights"),
        ({"settings": {"sleep": False, "seed": 1}}, "settings"),
        ({"steps": [results.Step(0.5, 0.25, 0.1 + 2**-56, 1.0, 1e-7, "ab", {})]}, "loss"),
        ({"steps": []}, "0 steps"),
        ({"ranks": 2}, "1 and 2 ranks"),
    ):
        second = results.Results(
            **{**vars(first), "settings": {"sleep": False, "seed": 0}, **change}
        )
        first.save(tmp_path / "first.json")
        second.save(tmp_path / "second.json")
        assert compare.main([str(tmp_path / f"{name}.json") for name in ("first", "second")]) == 1
        assert said in capsys.readouterr().out
    assert compare.main([str(tmp_path / "first.json")]) == 2


def test_tables_and_picture_show_the_results(example, tmp_path):
    pytest.importorskip("matplotlib")
    from rich.console import Console

    results, tables, picture = example("results"), example("tables"), example("picture")
    steps = [
        results.Step(
            0.1 * number,
            0.05 * number,
            0.01,
            1.0,
            0.001,
            "ab",
            {
                "generate": {"seconds": 0.5 if number else 9.0, "peak_bytes": 3 << 30},
                "train": {"seconds": 0.25, "peak_bytes": (2 + number) << 30},
            },
        )
        for number in range(4)
    ]
    made = results.Results({"sleep": True}, "H200", 2, 140 << 30, steps, "cd")
    assert tables.median_seconds(made) == {"generate": 0.5, "train": 0.25}  # without the first
    assert tables.peak_bytes(made)["train"] == 5 << 30
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    tables.draw(console, made)
    shown = console.export_text()
    assert "500.0" in shown and "5.00" in shown and "2 x H200" in shown and "15.0 %" in shown
    picture.save_picture(made, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    picture.save_picture(made, tmp_path / "run.svg")
    texts = (tmp_path / "run.svg").read_text()
    assert all(f"<!-- {name} -->" in texts for name in picture._LEGEND)  # the colours of all bars


def test_results_are_kept_without_matplotlib(example, tmp_path, monkeypatch, capsys):
    results, train = example("results"), example("train")
    stages = {"train": {"seconds": 0.25, "peak_bytes": 2 << 30}}
    steps = [results.Step(0.5, 0.25, 0.01, 1.0, 0.001, "ab", stages)]
    made = results.Results({"sleep": True}, "H200", 1, 140 << 30, steps, "cd")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "picture", raising=False)
    train.publish(made, tmp_path / "run")
    assert results.Results.load(tmp_path / "run.json") == made
    told = capsys.readouterr()
    assert "25.0 %" in told.out and "pip install matplotlib" in told.err
    assert not (tmp_path / "run.png").exists()


def test_results_keep_their_whole_name(example, tmp_path):
    results, train = example("results"), example("train")
    step = results.Step(0.5, 0.25, 0.1, 1.0, 1e-7, "ab", {})
    run = results.Results({"sleep": True, "seed": 0}, "CPU", 1, 0, [step], "cd")
    train.publish(run, tmp_path / "run.v1")
    assert results.Results.load(tmp_path / "run.v1.json") == run


@pytest.mark.parametrize("text", [None, "", "[]", '{"steps": 3}', '{"steps": [{}]}'])
def test_a_file_without_results_cannot_be_compared(example, tmp_path, capsys, text):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    assert example("compare").main([str(path)] * 2) == 2
    assert "cannot compare" in capsys.readouterr().err
