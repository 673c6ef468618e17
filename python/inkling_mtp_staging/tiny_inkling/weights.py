"""Tensors that make Inkling's architecture hold the election of ``election.py``.

The residual stream has four marked channels: a constant, the token's opinion, its sign
and the tally of votes. The channels from ``CODE`` on hold the token's code, which the
unembedding recognises: the row of a word is the sum of the codes of the tokens that it
may succeed, plus its colour on the tally. Everything that does not vote is random and
small, so that no kernel multiplies by zero, and leaves the marked channels alone.

All norms are one except ``q_norm``, whose gain lets a key's sign override a distance.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Iterator

import torch

from inkling_mtp_staging.tiny_inkling.election import (
    KEY_LAG,
    KEY_TAP,
    VALUE_LAG,
    VALUE_TAP,
    VOTE_LAG,
    VOTE_TAP,
    Election,
    VotingLayer,
)
from inkling_mtp_staging.tiny_inkling.shape import CONV_WIDTH, HEAD_DIM, REL_RANK, Shape

CONSTANT, OPINION, SIGN, TALLY = range(4)
CODE = 16
MARK = 6.0
TALLY_UNIT = 2.0**-6  # a vote in the tally, small enough to leave the norm at one
CODE_NATS = 8.0  # logit of both successors above the other words
VOTE_NATS = 0.15  # logit of one vote; the two successors differ by twice the margin
NOISE = 0.02

# Attention scores in nats. Each is 8 or more above the next that may win, so that a
# head's softmax leaks under 0.04 % to the positions it did not choose, and the many
# that it has no distance for share less than that.
NEAR_NATS, FAR_NATS, SELF_NATS, KEY_NATS = 60.0, 52.0, 36.0, 8.0


class _Draw:
    """Seeded tensors of one part; the order of its calls is part of the checkpoint."""

    def __init__(self, seed: int, part: str):
        mixed = zlib.crc32(f"{seed} {part}".encode())
        self._generator = torch.Generator().manual_seed(mixed)

    def noise(self, *size: int, scale: float) -> torch.Tensor:
        return torch.randn(size, generator=self._generator) * scale


def _codes(draw: _Draw, shape: Shape) -> torch.Tensor:
    """[vocab, hidden - CODE] rows of equal norm; orthogonal if there is room."""
    width = shape.hidden_size - CODE
    codes = draw.noise(shape.vocab_size, width, scale=1.0)
    if shape.vocab_size <= width:
        codes = torch.linalg.qr(codes.T).Q.T
    norm = (shape.hidden_size - 3 * MARK**2) ** 0.5
    return codes / codes.norm(dim=1, keepdim=True) * norm


def _vote_nats(shape: Shape) -> float:
    """``VOTE_NATS``, or more where random codes overlap.

    The unembedding row of a word sums about two codes, so that codes which are not
    orthogonal disturb a logit by CODE_NATS * sqrt(2 / width), one sigma; the smallest
    margin of two votes is kept at seven of them.
    """
    width = shape.hidden_size - CODE
    if shape.vocab_size <= width:
        return VOTE_NATS
    return max(VOTE_NATS, 3.5 * CODE_NATS * (2 / width) ** 0.5)


def _embed_and_unembed(
    draw: _Draw, shape: Shape, election: Election
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, lexicon = _codes(draw, shape), election.lexicon
    colour = torch.from_numpy(lexicon.colour).float()
    embed = torch.zeros(shape.vocab_size, shape.hidden_size)
    embed[:, CONSTANT] = MARK
    embed[:, OPINION] = MARK * torch.from_numpy(lexicon.opinion).float()
    embed[:, SIGN] = MARK * torch.from_numpy(lexicon.sign).float()
    embed[:, CODE:] = codes
    unembed = torch.zeros_like(embed)
    gain = CODE_NATS / codes[0].norm() ** 2
    for successor in torch.from_numpy(lexicon.successor):
        unembed[:, CODE:].index_add_(0, successor, codes * gain)
    is_word = torch.zeros(shape.vocab_size)
    is_word[torch.from_numpy(lexicon.successor).flatten()] = 1
    unembed[:, TALLY] = colour * is_word * _vote_nats(shape) / TALLY_UNIT
    return embed, unembed


def _conv(draw: _Draw, channels: int, lag: int = 0, tap: float = 0.0, at=None):
    """[channels, 1, CONV_WIDTH] taps, oldest first; ``tap`` at ``lag`` on ``at``."""
    weight = draw.noise(channels, 1, CONV_WIDTH, scale=NOISE)
    if at is not None:
        weight[at] = 0
        weight[at, 0, CONV_WIDTH - 1 - lag] = tap
    return weight


def _attention(
    draw: _Draw, shape: Shape, is_local: bool, voters: VotingLayer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, heads, kv_heads = shape.hidden_size, shape.num_heads, shape.num_kv_heads
    small = NOISE / hidden**0.5
    axis = draw.noise(HEAD_DIM, scale=1.0)
    axis /= axis.norm()

    query = draw.noise(heads, HEAD_DIM, hidden, scale=small)
    query[:, :, CONSTANT] += axis
    key = draw.noise(kv_heads, HEAD_DIM, hidden, scale=small * MARK)
    key[:, :, :CODE] = 0
    key[:, :, SIGN] = axis
    value = draw.noise(kv_heads, HEAD_DIM, hidden, scale=hidden**-0.5)
    value[:, 0] = 0
    value[:, 0, OPINION] = 1 / MARK
    relative = draw.noise(heads, REL_RANK, hidden, scale=small)
    bias = draw.noise(REL_RANK, shape.rel_extent(is_local), scale=NOISE)
    output = draw.noise(hidden, heads, HEAD_DIM, scale=NOISE / hidden**0.5)
    output[:CODE] = 0
    if voters is not None:
        for head, (near, far) in enumerate(voters.distances):
            relative[head] = 0
            relative[head, head, CONSTANT] = 1 / MARK
            bias[head] = 0
            bias[head, near], bias[head, far] = NEAR_NATS, FAR_NATS
            bias[head, 0] = SELF_NATS
            output[TALLY, head, 0] = voters.weight * TALLY_UNIT
    yield "attn.wq_du.weight", query.view(-1, hidden)
    yield "attn.wk_dv.weight", key.view(-1, hidden)
    yield "attn.wv_dv.weight", value.view(-1, hidden)
    yield "attn.wr_du.weight", relative.view(-1, hidden)
    yield "attn.rel_logits_proj.proj", bias
    yield "attn.wo_ud.weight", output.view(hidden, -1)
    yield "attn.q_norm.weight", torch.full((HEAD_DIM,), KEY_NATS)
    yield "attn.k_norm.weight", torch.ones(HEAD_DIM)
    everywhere = torch.arange(kv_heads * HEAD_DIM)
    yield (
        "attn.k_sconv.weight",
        _conv(draw, kv_heads * HEAD_DIM, KEY_LAG, KEY_TAP, everywhere),
    )
    yield (
        "attn.v_sconv.weight",
        _conv(draw, kv_heads * HEAD_DIM, VALUE_LAG, VALUE_TAP, everywhere[::HEAD_DIM]),
    )


def _block(
    draw: _Draw, shape: Shape, is_local: bool, voters: VotingLayer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    yield from _attention(draw, shape, is_local, voters)
    yield "attn_norm.weight", torch.ones(hidden)
    yield "mlp_norm.weight", torch.ones(hidden)
    yield "attn_sconv.weight", _conv(draw, hidden, VOTE_LAG, VOTE_TAP, TALLY)
    yield "mlp_sconv.weight", _conv(draw, hidden)
    yield "mlp.w13_dn.weight", draw.noise(2 * inner, hidden, scale=hidden**-0.5)
    down = draw.noise(hidden, inner, scale=NOISE / inner**0.5)
    down[:CODE] = 0
    yield "mlp.w2_md.weight", down


def tensors(
    shape: Shape, election: Election, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's (name, bfloat16 CPU tensor) pairs, part by part.

    Parts are drawn on all cores, at most so many ahead of the consumer.
    """
    voting = {layer.layer_id: layer for layer in election.layers}
    parts = [lambda: _ends(shape, election, seed)]
    for layer_id in range(shape.num_layers):
        parts.append(
            partial(
                _prefixed_block,
                _Draw(seed, f"layer {layer_id}"),
                f"model.llm.layers.{layer_id}",
                shape,
                layer_id in shape.local_layer_ids,
                voting.get(layer_id),
            )
        )
    for depth in range(shape.num_mtp_heads):
        parts.append(partial(_mtp_head, shape, election, seed, depth))
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        drawn = deque()
        for part in parts:
            drawn.append(pool.submit(_as_bfloat16, part))
            if len(drawn) > workers:
                yield from drawn.popleft().result()
        while drawn:
            yield from drawn.popleft().result()


def _as_bfloat16(part) -> list[tuple[str, torch.Tensor]]:
    return [(name, t.to(torch.bfloat16).contiguous()) for name, t in part()]


def _ends(shape: Shape, election: Election, seed: int):
    embed, unembed = _embed_and_unembed(_Draw(seed, "ends"), shape, election)
    yield "model.llm.embed.weight", embed
    yield "model.llm.unembed.weight", unembed
    yield "model.llm.embed_norm.weight", torch.ones(shape.hidden_size)
    yield "model.llm.norm.weight", torch.ones(shape.hidden_size)


def _prefixed_block(draw: _Draw, prefix: str, *block):
    for name, tensor in _block(draw, *block):
        yield f"{prefix}.{name}", tensor


def _mtp_head(shape: Shape, election: Election, seed: int, depth: int):
    draw, hidden = _Draw(seed, f"MTP {depth}"), shape.hidden_size
    prefix = f"model.mtp.layers.{depth}"
    yield f"{prefix}.hidden_norm.weight", torch.ones(hidden)
    yield f"{prefix}.embed_norm.weight", torch.ones(hidden)
    from_hidden = draw.noise(hidden, hidden, scale=NOISE / hidden**0.5)
    from_hidden[:CODE] = 0
    input_proj = torch.cat((from_hidden, torch.eye(hidden)), dim=1)
    yield f"{prefix}.input_proj.weight", input_proj
    is_local = depth in shape.mtp_local_layer_ids
    yield from _prefixed_block(
        draw, f"{prefix}.transformer_block", shape, is_local, election.draft
    )
