"""The rule that the small Inkling computes, in integers.

Every token has a colour, an opinion and a sign, each +1 or -1, and two possible
successors, one of each colour. The opinions of earlier tokens decide between the two.
(Were a token's opinion its colour, a majority would perpetuate itself and the text
would soon repeat.)

* A *voter* is an attention head that looks back by a fixed distance, near or far. It
  takes the far one only if the key sign is negative at the near one and positive at
  the far one; before the sequence is that long, it looks at the token itself. So
  position, key and value all matter.
* The key sign at a position is the sign of the token before it (the token's own at the
  start): the K short convolution. The value is its opinion plus twice the opinion two
  before: the V convolution. A layer's three voters sum to an odd number, and the
  attention convolution adds twice the sum one position earlier.
* Up to five layers vote, the first with an adjustable weight. Weights sum to an odd number,
  so that the result is odd: never a tie, and a margin no rounding crosses.

A draft head holds the first layer's voters only. It is right when their vote has the
sign of the whole election, so the first layer's weight sets how many drafts are
accepted; a negative weight makes more of them wrong than chance would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Sequence

import numpy as np

VOTERS_PER_LAYER = 3
VALUE_LAG, VALUE_TAP = 2, 2
KEY_LAG, KEY_TAP = 1, 2
VOTE_LAG, VOTE_TAP = 1, 2

# With 3, the weights left to the first layer are close enough for an accept length to
# be met within a quarter, and the tally still counts single votes in bfloat16.
PRIVATE_WEIGHT = 3

RING = 31

COMMON_DISTANCES = ((1, 33), (41, 47), (53, 61))
FULL_DISTANCES = (
    ((6, 11), (100, 230), (300, 700)),
    ((4, 13), (65, 129), (511, 1000)),
)


def local_distances(window: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Voters of the two sliding-window layers; the last looks at the window's edge."""
    return (
        ((3, 8), (17, window // 2), (window - 3, window - 1)),
        ((7, 12), (31, window // 2 + 1), (window // 2 - 1, window - 2)),
    )


@dataclass(frozen=True)
class VotingLayer:
    """A layer's voters: ``distances`` is one (near, far) pair in tokens a head."""

    layer_id: int
    is_local: bool
    weight: int
    distances: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Lexicon:
    """What each token id stands for. All arrays are indexed by token id.

    ``colour``, ``opinion`` and ``sign`` hold +1 or -1; ``successor[0]`` and
    ``successor[1]`` the successor of colour -1 and of colour +1.
    """

    colour: np.ndarray
    opinion: np.ndarray
    sign: np.ndarray
    successor: np.ndarray

    @classmethod
    def draw(cls, vocab_size: int, words: range, seed: int) -> Lexicon:
        """Draw a lexicon in which only ``words`` (token ids) succeed any token.

        Words stand in a ring of ``RING`` groups and each is followed by one of the next
        group, so that the text cannot fall into a shorter loop. Within a group, words
        of a colour succeed equally many tokens, to within one: none attracts the text.
        """
        rng = np.random.default_rng(seed)
        colour, opinion, sign = rng.choice((-1, 1), (3, vocab_size))
        group = rng.integers(RING, size=vocab_size)
        in_group = np.arange(len(words)) % (2 * RING)
        group[words.start : words.stop] = in_group // 2
        colour[words.start : words.stop] = 2 * (in_group % 2) - 1
        successor = np.empty((2, vocab_size), dtype=np.int64)
        is_word = np.isin(np.arange(vocab_size), words)
        for row, wanted in enumerate((-1, 1)):
            for g in range(RING):
                here = np.flatnonzero(group == g)
                following = is_word & (group == (g + 1) % RING) & (colour == wanted)
                pool = rng.permutation(np.flatnonzero(following))
                successor[row, here] = rng.permutation(np.resize(pool, len(here)))
        return cls(colour, opinion, sign, successor)


def layer_vote(
    layer: VotingLayer, opinion: np.ndarray, sign: np.ndarray, start: int = 0
) -> np.ndarray:
    """The layer's vote at each position from ``start`` on, before its weight.

    ``opinion`` and ``sign`` are those of the tokens of one sequence, in order.
    """
    first = max(start - VOTE_LAG, 0)
    positions = np.arange(first, len(opinion))
    key = sign.copy()
    key[KEY_LAG:] = sign[:-KEY_LAG]
    value = opinion.copy()
    value[VALUE_LAG:] += VALUE_TAP * opinion[:-VALUE_LAG]
    total = np.zeros(len(positions), dtype=np.int64)
    for near, far in layer.distances:
        at_near = np.where(positions >= near, positions - near, positions)
        at_far = np.where(positions >= far, positions - far, at_near)
        takes_far = (key[at_near] < 0) & (key[at_far] > 0)
        total += value[np.where(takes_far, at_far, at_near)]
    vote = total.copy()
    vote[VOTE_LAG:] += VOTE_TAP * total[:-VOTE_LAG]
    return vote[start - first :]


@dataclass(frozen=True)
class Election:
    lexicon: Lexicon
    layers: tuple[VotingLayer, ...]

    @property
    def common(self) -> VotingLayer:
        return self.layers[0]

    @property
    def draft(self) -> VotingLayer:
        """The draft heads' voters. Against a negative weight, drafts are mostly wrong."""
        return replace(self.common, weight=1)

    def margin(self, tokens: Sequence[int], start: int = 0) -> np.ndarray:
        """The election's result at each position of ``tokens`` from ``start`` on.

        It is odd; its sign is the colour of the next token.
        """
        opinion = self.lexicon.opinion[np.asarray(tokens)]
        sign = self.lexicon.sign[np.asarray(tokens)]
        return sum(
            layer.weight * layer_vote(layer, opinion, sign, start)
            for layer in self.layers
        )

    def next_token(self, tokens: Sequence[int]) -> int:
        margin = self.margin(tokens, len(tokens) - 1)[0]
        return int(self.lexicon.successor[int(margin > 0), tokens[-1]])

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The greedy continuation of ``prompt``, ``num_tokens`` long."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]


def agreement(layers: Sequence[VotingLayer], draws: int = 1 << 16) -> float:
    """How often the first layer's vote has the election's sign, for random text.

    Monte Carlo with a fixed seed; the standard error is under 0.002.
    """
    rng = np.random.default_rng(0)
    opinion, sign = rng.choice((-1, 1), (2, draws))
    votes = [layer_vote(layer, opinion, sign) for layer in layers]
    result = sum(layer.weight * vote for layer, vote in zip(layers, votes, strict=True))
    return float(np.mean((votes[0] > 0) == (result > 0)))


def accept_length(agreement: float, num_steps: int) -> float:
    """Tokens a step, the bonus token included, if each draft is right independently.

    A chain of ``num_steps`` drafts is accepted up to the first wrong one, so the
    expected length is 1 + p + p^2 + ... + p^num_steps.
    """
    return sum(agreement**k for k in range(num_steps + 1))


def hold_election(
    num_layers: int, window: int, accept: float, num_steps: int
) -> tuple[tuple[VotingLayer, ...], float]:
    """Choose the voting layers, and the first one's weight for an accept length.

    Returns the layers and the accept length expected of ``num_steps`` drafts. The
    weight is an integer, so the expected length is the nearest that one reaches.
    Raises ValueError for a length that no weight comes near.
    """
    local, full = list(local_distances(window)), list(FULL_DISTANCES)
    voting = [(0, False, COMMON_DISTANCES)]
    for layer_id in sorted({1 + i * (num_layers - 2) // 3 for i in range(4)}):
        is_local = layer_id % 2 == 1
        pool = local if is_local else full
        if pool:
            voting.append((layer_id, is_local, pool.pop(0)))
    candidates = []
    for weight in range(-16, 64):
        if weight == 0 or (weight + PRIVATE_WEIGHT * (len(voting) - 1)) % 2 == 0:
            continue
        layers = tuple(
            VotingLayer(
                layer_id,
                is_local,
                weight if layer_id == 0 else PRIVATE_WEIGHT,
                distances,
            )
            for layer_id, is_local, distances in voting
        )
        candidates.append((layers, accept_length(agreement(layers), num_steps)))
    layers, expected = min(candidates, key=lambda c: abs(c[1] - accept))
    if not math.isclose(expected, accept, abs_tol=0.25):
        low, high = min(e for _, e in candidates), max(e for _, e in candidates)
        raise ValueError(
            f"accept length {accept} with {num_steps} draft steps is out of reach: "
            f"choose between {low:.2f} and {high:.2f}"
        )
    return layers, expected
