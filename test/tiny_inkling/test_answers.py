"""The constructed weights compute the election, and the drafts are partly right."""

import numpy as np
import pytest
import torch
from inkling_reference import draft, target

from inkling_mtp_staging.tiny_inkling.election import layer_vote
from inkling_mtp_staging.tiny_inkling.recipe import Recipe
from inkling_mtp_staging.tiny_inkling.shape import Shape
from inkling_mtp_staging.tiny_inkling.weights import tensors

pytestmark = pytest.mark.filterwarnings("ignore")


class Model:
    def __init__(self, recipe: Recipe):
        self.recipe, self.shape = recipe, recipe.shape
        self.election = recipe.election()
        weights = tensors(self.shape, self.election, recipe.seed)
        self.tensors = {name: tensor.float() for name, tensor in weights}

    def text(self, prompt_length: int, answer_length: int) -> list[int]:
        rng = np.random.default_rng(prompt_length)
        prompt = rng.integers(1, self.shape.vocab_size, prompt_length).tolist()
        return prompt + self.election.answer(prompt, answer_length)


@pytest.fixture(scope="module")
def model():
    return Model(Recipe(Shape(hidden_size=512, vocab_size=448, num_mtp_heads=2)))


@pytest.mark.parametrize("prompt_length", [1, 2, 5, 127, 128, 129, 1030])
def test_greedy_answer_is_the_elections(model, prompt_length):
    text = model.text(prompt_length, 80)
    _, logits = target(model.tensors, model.shape, torch.tensor(text[:-1]))
    assert logits[prompt_length - 1 :].argmax(-1).tolist() == text[prompt_length:]
    first, second = logits[prompt_length - 1 :].topk(2).values.T
    assert (first - second).min() > 0.2


def test_overlapping_codes_still_give_the_elections_answer():
    model = Model(Recipe(Shape(hidden_size=512, vocab_size=4096, num_mtp_heads=0)))
    text = model.text(300, 200)
    _, logits = target(model.tensors, model.shape, torch.tensor(text[:-1]))
    assert logits[299:].argmax(-1).tolist() == text[300:]


def test_deep_models_answer_alike():
    shape = Shape(num_layers=17, hidden_size=512, vocab_size=448, num_mtp_heads=0)
    model = Model(Recipe(shape))
    text = model.text(200, 100)
    _, logits = target(model.tensors, shape, torch.tensor(text[:-1]))
    assert logits[199:].argmax(-1).tolist() == text[200:]


def test_a_draft_is_the_first_voting_layers_choice(model):
    text = model.text(200, 200)
    hidden, _ = target(model.tensors, model.shape, torch.tensor(text[:-1]))
    logits = draft(model.tensors, model.shape, 0, hidden, torch.tensor(text[1:]))
    lexicon, following = model.election.lexicon, np.array(text[1:])
    vote = layer_vote(
        model.election.common, lexicon.opinion[following], lexicon.sign[following]
    )
    expected = lexicon.successor[(vote > 0).astype(int), following]
    assert logits.argmax(-1).tolist() == expected.tolist()


@pytest.mark.parametrize("wanted", [1.5, 2.0, 2.5, 3.0, 3.5])
def test_accept_length_is_near_what_was_asked_for(wanted):
    recipe = Recipe(Shape(), accept_length=wanted)
    election, lexicon = recipe.election(), recipe.election().lexicon
    tokens = steps = 0
    for prompt_length in range(100, 900, 50):
        rng = np.random.default_rng(prompt_length)
        prompt = rng.integers(1, 960, prompt_length).tolist()
        text = np.array(prompt + election.answer(prompt, 256))
        vote = layer_vote(election.common, lexicon.opinion[text], lexicon.sign[text])
        right = ((vote > 0) == (election.margin(text) > 0))[prompt_length:]
        position = 0
        while position + 4 < len(right):
            drafts = right[position + 1 : position + 4]
            position += 1 + (3 if drafts.all() else int(drafts.argmin()))
            steps += 1
        tokens += position
    assert recipe.expected_accept_length() == pytest.approx(wanted, abs=0.25)
    assert tokens / steps == pytest.approx(wanted, abs=0.4)


def test_the_text_does_not_repeat():
    election = Recipe(Shape()).election()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        answer = election.answer(rng.integers(1, 960, 100).tolist(), 512)
        assert len({tuple(answer[i : i + 8]) for i in range(504)}) > 450


def test_every_kind_of_voter_decides_some_tokens(model):
    """Take one voting layer away: the answer must change, whichever it is."""
    text = model.text(1100, 200)
    margin = model.election.margin(text)
    lexicon, tokens = model.election.lexicon, np.array(text)
    for layer in model.election.layers:
        vote = layer.weight * layer_vote(
            layer, lexicon.opinion[tokens], lexicon.sign[tokens]
        )
        assert (((margin - vote) > 0) != (margin > 0)).mean() > 0.05
