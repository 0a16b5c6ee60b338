"""Tests the task, the reward and the parts of the algorithm in examples/grpo."""

import json

import pytest
from repository import ROOT

torch = pytest.importorskip("torch")

EXAMPLE = ROOT / "examples" / "grpo"


# --- the task -------------------------------------------------------------------------------------


def test_problems_are_sums_and_the_same_for_a_seed(example):
    arithmetic = example("arithmetic")
    made = arithmetic.problems(50, 12, seed=3, step=7)
    for problem in made:
        first, second = problem.text.removesuffix("=").split("+")
        assert int(first) + int(second) == int(problem.answer) and int(first) <= 12
    assert made == arithmetic.problems(50, 12, seed=3, step=7)
    assert made != arithmetic.problems(50, 12, seed=3, step=8)
    assert made != arithmetic.problems(50, 12, seed=4, step=7)


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        ("7.", 1.0),
        ("8.", 0.1),
        ("07.", 0.1),
        ("7", 0.0),  # no end of the answer
        (".", 0.0),
        ("7+.", 0.0),
        ("?.", 0.0),
        ("7..", 0.0),
        ("", 0.0),
        ("².", 0.0),
    ],
)
def test_answers_have_their_rewards(example, answer, worth):
    arithmetic = example("arithmetic")
    assert arithmetic.reward(arithmetic.Problem("3+4=", "7"), answer) == worth


def test_vocabulary_of_its_own(example):
    vocabulary = example("vocabulary").Vocabulary.own()
    tokens = vocabulary.encode("12+4=")
    assert tokens[0] == vocabulary.start and len(set(vocabulary.ids.values())) == 14
    assert vocabulary.decode([*tokens[1:], vocabulary.end, vocabulary.pad]) == "12+4=.?"
    assert max(*vocabulary.ids.values(), vocabulary.end) < vocabulary.size
    assert not {vocabulary.pad, vocabulary.start, vocabulary.end} & set(vocabulary.ids.values())


def test_vocabulary_of_a_checkpoint(example, tmp_path):
    vocabulary = example("vocabulary")
    known = {symbol: 15 + i for i, symbol in enumerate(vocabulary.SYMBOLS)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": known}}))
    config = {"vocab_size": 100, "eos_token_id": [90, 91], "bos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = vocabulary.Vocabulary.of_model(tmp_path)
    assert found.encode("9=") == [90, 15 + 9, 15 + vocabulary.SYMBOLS.index("=")]
    assert (found.pad, found.end, found.size) == (90, 90, 100)
    del known["*"]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": known}}))
    with pytest.raises(ValueError, match=r"no tokens for \*"):
        vocabulary.Vocabulary.of_model(tmp_path)


# --- the algorithm --------------------------------------------------------------------------------


def test_advantages_are_deviations_within_a_group(example):
    group_advantages = example("advantages").group_advantages
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 4.0])
    found = group_advantages(rewards, 4)
    assert torch.equal(found[:4], torch.tensor([-1.0, 1.0, -1.0, 1.0]))
    assert torch.equal(found[4:8], torch.zeros(4))  # equal rewards: no advantages
    assert found[8:].mean().abs() < 1e-6 and found[8:].square().mean() == pytest.approx(1)


def test_log_probabilities_are_those_of_the_next_token(example):
    token_logprobs = example("policy_loss").token_logprobs
    logits, tokens = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    found = token_logprobs(logits, tokens)
    for row in range(3):
        for at in range(4):
            expected = logits[row, at].log_softmax(-1)[tokens[row, at + 1]]
            assert found[row, at] == pytest.approx(float(expected), abs=1e-6)


def test_log_probabilities_are_those_of_the_temperature(example):
    token_logprobs = example("policy_loss").token_logprobs
    logits, tokens = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    halved = token_logprobs(logits, tokens, 0.5)
    assert torch.equal(halved, token_logprobs(2 * logits, tokens))
    assert not torch.allclose(halved, token_logprobs(logits, tokens))


def test_the_gradient_on_policy_is_the_policy_gradient(example):
    clipped_loss = example("policy_loss").clipped_loss
    logprobs = torch.randn(4, 6, dtype=torch.double, requires_grad=True)
    gain = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.double)
    mask = (torch.rand(4, 6) > 0.4).double()
    clipped_loss(logprobs, logprobs.detach(), gain, mask, 0.2, 24.0).backward()
    assert torch.allclose(logprobs.grad, -gain[:, None] * mask / 24)


@pytest.mark.parametrize(
    ("ratio", "gain", "slope"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False)],
)
def test_a_clipped_ratio_has_no_gradient(example, ratio, gain, slope):
    clipped_loss = example("policy_loss").clipped_loss
    old = torch.zeros(1, 1)
    logprobs = torch.full((1, 1), ratio).log().requires_grad_()
    clipped_loss(logprobs, old, torch.tensor([gain]), torch.ones(1, 1), 0.2, 1.0).backward()
    assert bool(logprobs.grad.any()) == slope


def test_a_loss_is_the_same_however_rows_are_split(example):
    clipped_loss = example("policy_loss").clipped_loss
    new, old = torch.randn(8, 5).double(), torch.randn(8, 5).double()
    gain, mask = torch.randn(8).double(), (torch.rand(8, 5) > 0.3).double()
    total = float(mask.sum())
    whole = clipped_loss(new, old, gain, mask, 0.2, total)
    parts = [
        clipped_loss(new[i : i + 3], old[i : i + 3], gain[i : i + 3], mask[i : i + 3], 0.2, total)
        for i in range(0, 8, 3)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-12)


def test_batches_have_each_answer_behind_its_prompt(example):
    from memsaver.integrations.rollout import RolloutOutput, Sample

    batch_of = example("batches").batch_of
    samples = [
        Sample([7, 2], [-0.5, -0.25], "stop", None),
        Sample([8], [-1.0], "length", None),
        Sample([9, 9, 9], [-1.0, -2.0, -3.0], "length", None),
    ]
    output = RolloutOutput.of(samples, [0, 0, 1], pad_token_id=31)
    batch = batch_of([[1, 5], [1, 5, 6]], output, torch.tensor([1.0, 2.0, 3.0]))
    assert batch.tokens.tolist() == [
        [1, 5, 7, 2, 31, 31],
        [1, 5, 8, 31, 31, 31],
        [1, 5, 6, 9, 9, 9],
    ]
    assert batch.mask.tolist() == [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]]
    assert batch.engine_logprobs.tolist() == [
        [0, -0.5, -0.25, 0, 0],
        [0, -1.0, 0, 0, 0],
        [0, 0, -1.0, -2.0, -3.0],
    ]
    assert torch.equal(batch.rows(1, 3).tokens, batch.tokens[1:])
