"""Tests complete runs of examples/grpo on the simulated driver, which must be bit-identical."""

import json
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import rank_processes
from child_process import environment_without
from repository import ROOT

torch = pytest.importorskip("torch")

EXAMPLE = ROOT / "examples" / "grpo"


# --- whole runs -----------------------------------------------------------------------------------

# A run of the example with a pure torch policy, which predicts a token from the two before it.
RUN = """
import sys
from pathlib import Path
from collections import namedtuple
import torch

sys.path.insert(0, {example!r})
from determinism import make_deterministic
from dataclasses import replace
from loop import run
from model_engine import ModelEngine
from places import leave_place, take_place
from settings import Settings
from vocabulary import Vocabulary


Output = namedtuple("Output", "logits")  # FSDP2 looks into those for what to wait for


class Policy(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = torch.nn.Embedding(size, 32)
        self.hidden = torch.nn.Linear(4 * 32, 64)
        self.out = torch.nn.Linear(64, size)

    def forward(self, input_ids, use_cache):
        embedded = self.embedding(input_ids)
        before = [
            torch.nn.functional.pad(embedded, (0, 0, back, 0))[:, : embedded.shape[1]]
            for back in range(4)
        ]
        logits = self.out(torch.relu(self.hidden(torch.cat(before, -1))))
        return Output(logits)


settings = Settings(engine="model", rate=3e-3, largest=2, answer_tokens=2, **{options!r})
make_deterministic(settings.seed)
place = take_place(settings.tp)
vocabulary = Vocabulary.own()
torch.manual_seed(1)
model = Policy(vocabulary.size)
engine = ModelEngine(model, vocabulary.pad, place.device)
if place.shard_mesh is not None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(model, mesh=place.shard_mesh)
results = run(settings, vocabulary, place, engine, model)
results.save(Path(f"{{place.rank}}.json"))
leave_place()
"""


def run_ranks(tmp_path, name, ranks, **options):
    """Run the example on `ranks` ranks and return the folder with their results."""
    folder = tmp_path / name
    folder.mkdir()
    code = RUN.format(example=str(EXAMPLE), options=options)
    rank_processes.run(code, ranks, folder, timeout=110)
    return folder


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_learns_and_is_the_same_with_and_without_sleep(example, tmp_path, ranks):
    results, compare = example("results"), example("compare")
    steps = {"steps": 24, "prompts": 16, "samples": 16}
    sleeping = run_ranks(tmp_path, "sleeping", ranks, **steps)
    plain = run_ranks(tmp_path, "plain", ranks, **steps, sleep=False)
    for rank in range(ranks):
        paths = [str(folder / f"{rank}.json") for folder in (sleeping, plain)]
        assert compare.main(paths) == 0
    # Each rank has its own answers and shards; every rank's digests cover those of all ranks.
    of_ranks = [results.Results.load(sleeping / f"{rank}.json") for rank in range(ranks)]
    assert compare.differences(of_ranks[0], of_ranks[-1]) == []
    first = results.Results.load(sleeping / "0.json")
    assert first.steps[-1].reward > first.steps[0].reward + 0.1
    assert len({step.answers for step in first.steps}) == 24
    # The engine has the trainer's weights, so it samples with the trainer's probabilities.
    assert all(step.gap < 1e-5 for step in first.steps)
    assert {"pause_optimizer", "update", "pause_model", "wake_rest"} <= set(first.stages())
    assert set(results.Results.load(plain / "0.json").stages()) == {
        "settle",
        "update",
        "generate",
        "train",
    }


def test_the_learner_has_the_policy_that_sampled(example, tmp_path):
    options = {"steps": 3, "prompts": 4, "samples": 4, "temperature": 0.5}
    folder = run_ranks(tmp_path, "cooler", 1, **options)
    steps = example("results").Results.load(folder / "0.json").steps
    assert len(steps) == 3 and all(0 < step.gap < 1e-5 for step in steps)


class Ranks:
    """A fake two-rank `torch.distributed` on rank 0. The test sets the other rank's values."""

    def __init__(self, monkeypatch, others):
        self.others = others
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
        monkeypatch.setattr(torch.distributed, "all_gather_object", self.gather)

    def gather(self, found, mine):
        found[:] = [mine, self.others]


def test_a_digest_is_of_all_ranks(example, monkeypatch):
    digest = example("results").digest_over_ranks
    assert digest("ab") == "ab"  # a single process
    ranks = Ranks(monkeypatch, "cd")
    both = digest("ab")
    assert digest("ab") == both and digest("ac") != both
    ranks.others = "ce"
    assert digest("ab") != both


def test_answers_of_another_rank_that_differ_are_seen(example, monkeypatch):
    from memsaver.integrations.rollout import RolloutOutput, Sample

    loop, learner, places = example("loop"), example("learner"), example("places")
    settings = example("settings").Settings(engine="model", prompts=2, samples=2)
    vocabulary = example("vocabulary").Vocabulary.own()
    samples = [Sample([vocabulary.end], [-1.0], "stop", None)] * 2
    output = RolloutOutput.of(samples, [0, 1], pad_token_id=vocabulary.pad)
    session = SimpleNamespace(
        rollout=lambda: nullcontext(SimpleNamespace(generate=lambda *_: output)),
        training=nullcontext,
        stages=(),
    )
    learning = SimpleNamespace(learn=lambda batch: learner.Learned(0.0, 0.0, 0.0))
    place = places.Place(0, 2, torch.device("cpu"))
    ranks = Ranks(monkeypatch, "cd")
    steps = []
    for ranks.others in ("cd", "ce", "cd"):
        steps.append(loop.take_step(0, settings, vocabulary, place, session, learning))
    assert steps[0] == steps[2] and steps[0].answers != steps[1].answers


def test_problems_that_cannot_be_shared_out_are_refused_before_anything_starts(
    example, monkeypatch
):
    train, places = example("train"), example("places")
    engines, determinism = example("engines"), example("determinism")
    started = []
    monkeypatch.setattr(places, "take_place", lambda tp: places.Place(0, 3, torch.device("cpu")))
    monkeypatch.setattr(engines, "make_engine", lambda *_: started.append("engine"))
    monkeypatch.setattr(determinism, "make_deterministic", lambda seed: None)
    monkeypatch.setenv("MEMSAVER_DRIVER", "sim")
    with pytest.raises(ValueError, match="64 problems cannot be divided among 3 ranks"):
        train.start(example("settings").Settings(engine="model", model="tiny"))
    assert not started


def test_tied_weights_go_to_the_engine_once(example):
    from memsaver.integrations.rollout.weights.sources import sources_of

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(8, 4)
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.ones(3))

    sent = example("loop").weights_for(torch.bfloat16, Tied())
    assert {name: tensor.dtype for name, tensor in sent.items()} == dict.fromkeys(
        ("embed.weight", "head.weight", "table"), torch.bfloat16
    )
    same = {s.spec.name: s.spec.same for s in sources_of(sent, rename=None)}
    assert same["head.weight"] == "embed.weight" and not same["embed.weight"]


# --- the model's copy as engine -------------------------------------------------------------------


def test_the_models_copy_samples_by_its_probabilities(example, sim):
    engine_module = example("model_engine")

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

        def forward(self, input_ids, use_cache):
            return SimpleNamespace(logits=self.bias.expand(*input_ids.shape, 3))

    engine = engine_module.ModelEngine(Fixed(), 0, torch.device("cpu"))
    params = {"temperature": 1.0, "max_new_tokens": 4, "stop_token_ids": [0]}
    seeded = [{**params, "sampling_seed": seed} for seed in range(300)]
    engine.update_weights(Fixed().state_dict())
    output = engine.generate([[1]] * 300, seeded)
    expected = torch.tensor([0.0, 1.0, 2.0]).log_softmax(-1)
    first = torch.bincount(output.token_ids[:, 0], minlength=3) / 300
    assert torch.allclose(first, expected.exp(), atol=0.08)
    rows = output.attention_mask.bool()
    assert torch.allclose(output.logprobs[rows], expected[output.token_ids[rows]])
    for row, length in enumerate(output.lengths.tolist()):
        ended = output.token_ids[row, length - 1] == 0
        assert output.finish_reasons[row] == ("stop" if ended else "length")
        assert ended or length == 4
    again = engine.generate([[1]] * 300, seeded)
    assert torch.equal(again.token_ids, output.token_ids)
    engine.sleep()
    import memsaver

    with pytest.raises(memsaver.InvalidStateError, match="paused"):
        engine.generate([[1]], seeded[:1])
    engine.wake_up()
    with pytest.raises(memsaver.ConfigError, match="bias"):
        engine.update_weights({})
    assert not any(engine._model.state_dict()["bias"])  # zeroed, as SGLang's would be
    engine.update_weights(Fixed().state_dict())
    assert torch.equal(engine.generate([[1]] * 300, seeded).token_ids, output.token_ids)
    del engine


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "tgi"], "must be one of sglang, vllm, model, not 'tgi'"),
        (["--verify", "all"], "must be one of off"),
        (["--out", "nowhere/run"], "there is no folder nowhere"),
        (["--engine", "model", "--model", "huge"], "or a Qwen3's folder, not 'huge'"),
        (["--engine", "model", "--tp", "2"], "1 ranks cannot be divided into engines of 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_are_refused_before_anything_starts(run_python, tmp_path, options, said):
    folder = tmp_path / "empty"
    folder.mkdir()
    done = run_python(
        f"""
        import os, runpy, sys

        os.chdir({str(folder)!r})
        sys.path.insert(0, {str(EXAMPLE)!r})
        sys.argv = ["train.py", *{options!r}]
        runpy.run_path({str(EXAMPLE / "train.py")!r}, run_name="__main__")
        """,
        status=2,
        with_torch=True,
        COLUMNS=200,
        NO_COLOR=1,
    )
    assert done.stdout == ""
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not any(folder.iterdir())


@pytest.mark.parametrize(
    ("options", "missing", "said"),
    [
        ({"engine": "model"}, {"matplotlib"}, r"matplotlib \(pip install .* --no-picture\)"),
        ({"engine": "model"}, {"transformers", "matplotlib"}, "transformers, matplotlib"),
        ({}, {"sglang"}, r"sglang \(pip install sglang; without SGLang: --engine model\)"),
        (
            {"engine": "vllm"},
            {"vllm"},
            r"vllm \(pip install vllm; without vLLM: --engine model\)",
        ),
        ({}, set(), "SGLang needs a GPU"),
    ],
)
def test_missing_packages_are_reported_before_anything_starts(
    example, monkeypatch, options, missing, said
):
    requirements = example("requirements")
    settings, train = example("settings"), example("train")
    engines, determinism = example("engines"), example("determinism")
    monkeypatch.setattr(requirements, "is_installed", lambda name: name not in missing)
    monkeypatch.setattr(requirements, "GPU", "/dev/no such GPU")
    monkeypatch.setattr(engines, "make_engine", lambda *_: pytest.fail("an engine was started"))
    monkeypatch.setattr(determinism, "make_deterministic", lambda seed: None)
    monkeypatch.setenv("MEMSAVER_DRIVER", "sim")
    with pytest.raises(settings.SettingsError, match=said):
        train.start(settings.Settings(model="tiny", **options), picture=True)


def test_unused_packages_need_not_be_installed(example, monkeypatch):
    requirements, settings = example("requirements"), example("settings").Settings
    monkeypatch.setattr(requirements, "is_installed", lambda name: name == "transformers")
    requirements.check_installed(settings(engine="model"), picture=False)
    requirements.check_installed(settings(), picture=False, started=True)
    assert not requirements.is_installed("matplotlib")


def test_the_list_of_requirements_equals_the_checked_ones(example):
    lines = (EXAMPLE / "requirements.txt").read_text().splitlines()
    listed = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert listed >= {"transformers", "sglang", "matplotlib", "typer", "rich"}


# --- with transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_documented_commands_run(example, tmp_path, ranks):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    for name, options in (("sleeping", ["--sleep"]), ("plain", ["--no-sleep"])):
        done = subprocess.run(
            [
                sys.executable,
                *(launcher if ranks > 1 else []),
                str(EXAMPLE / "train.py"),
                *("--engine", "model", "--model", "tiny", "--out", name),
                *("--steps", "3", "--prompts", "8", "--samples", "8"),
                *options,
            ],
            env={**environment_without("MEMSAVER_"), "MEMSAVER_DRIVER": "sim"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 2: reward" in done.stdout and f"{ranks} x CPU" in done.stdout
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    compared = subprocess.run(
        [sys.executable, str(EXAMPLE / "compare.py"), "sleeping.json", "plain.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert compared.returncode == 0, compared.stdout


def test_an_engine_starts_with_the_models_configuration(example, tmp_path):
    pytest.importorskip("transformers")
    engines, policies = example("engines"), example("policy_model")
    vocabulary = example("vocabulary").Vocabulary.own()
    settings = example("settings").Settings(model="tiny", memory_fraction=0.3)
    arguments = engines.sglang_arguments(settings, vocabulary, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["vocab_size"] == 32
    assert config["eos_token_id"] == vocabulary.end
    assert arguments["load_format"] == "dummy" and arguments["mem_fraction_static"] == 0.3
    model = policies.make_model("tiny", vocabulary, 5, torch.device("cpu"))
    again = policies.make_model("tiny", vocabulary, 5, torch.device("cpu"))
    pairs = zip(model.state_dict().items(), again.state_dict().items(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    model.save_pretrained(tmp_path / "checkpoint")
    local = example("settings").Settings(model=str(tmp_path / "checkpoint"))
    arguments = engines.sglang_arguments(local, vocabulary, tmp_path)
    assert (arguments["load_format"], arguments["model_path"]) == ("auto", local.model)
    arguments = engines.vllm_arguments(local, vocabulary, tmp_path)
    assert (arguments["load_format"], arguments["model"]) == ("auto", local.model)
    assert arguments["attention_config"] == {"backend": "TRITON_ATTN"}
    loaded = policies.make_model(local.model, vocabulary, 9, torch.device("cpu"))
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
