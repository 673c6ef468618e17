"""Inkling's forward pass in plain float32 torch, one sequence, no cache.

Written from the architecture's definition as an independent check of the constructed
weights: it shares no code with the server or with the election rule.
"""

import torch
import torch.nn.functional as F

from inkling_mtp_staging.tiny_inkling.shape import CONV_WIDTH, HEAD_DIM, REL_RANK

EPS = 1e-6


def norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def short_conv(x, weight):
    """Causal depthwise convolution plus residual: x [T, D], weight [D, 1, W]."""
    padded = F.pad(x.T, (CONV_WIDTH - 1, 0))
    return F.conv1d(padded, weight, groups=x.shape[1]).T + x


def attention(x, w, window):
    """x [T, H]; ``window`` is the number of visible positions or None."""
    length = x.shape[0]
    q = (x @ w["attn.wq_du.weight"].T).view(length, -1, HEAD_DIM)
    k = short_conv(x @ w["attn.wk_dv.weight"].T, w["attn.k_sconv.weight"])
    v = short_conv(x @ w["attn.wv_dv.weight"].T, w["attn.v_sconv.weight"])
    k, v = (t.view(length, -1, HEAD_DIM) for t in (k, v))
    q, k = norm(q, w["attn.q_norm.weight"]), norm(k, w["attn.k_norm.weight"])
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    r = (x @ w["attn.wr_du.weight"].T).view(length, -1, REL_RANK)
    bias = r @ w["attn.rel_logits_proj.proj"]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    extent = bias.shape[-1]
    near = (distance >= 0) & (distance < extent)
    index = distance.clamp(0, extent - 1).expand(q.shape[1], -1, -1)
    scores = torch.einsum("thd,shd->hts", q, k) / HEAD_DIM
    scores = scores + bias.transpose(0, 1).gather(2, index) * near
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    out = torch.einsum("hts,shd->thd", weights, v).reshape(length, -1)
    return out @ w["attn.wo_ud.weight"].T


def mlp(x, w):
    inner = x @ w["mlp.w13_dn.weight"].T
    return (F.silu(inner[:, ::2]) * inner[:, 1::2]) @ w["mlp.w2_md.weight"].T


def block(x, w, window):
    """One decoder layer, its convolutions and residuals included."""
    attended = attention(norm(x, w["attn_norm.weight"]), w, window)
    x = x + short_conv(attended, w["attn_sconv.weight"])
    return x + short_conv(mlp(norm(x, w["mlp_norm.weight"]), w), w["mlp_sconv.weight"])


def under(tensors, prefix):
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def target(tensors, shape, tokens):
    """Return (hidden states [T, H], logits [T, V]) of ``tokens``."""
    x = norm(
        tensors["model.llm.embed.weight"][tokens],
        tensors["model.llm.embed_norm.weight"],
    )
    for layer_id in range(shape.num_layers):
        is_local = layer_id in shape.local_layer_ids
        window = shape.sliding_window if is_local else None
        x = block(x, under(tensors, f"model.llm.layers.{layer_id}."), window)
    hidden = norm(x, tensors["model.llm.norm.weight"])
    return hidden, hidden @ tensors["model.llm.unembed.weight"].T


def draft(tensors, shape, depth, hidden, tokens):
    """Logits [T, V] of a draft depth for ``hidden`` [T, H] and the next ``tokens``."""
    w = under(tensors, f"model.mtp.layers.{depth}.")
    embed = norm(
        tensors["model.llm.embed.weight"][tokens],
        tensors["model.llm.embed_norm.weight"],
    )
    both = torch.cat(
        (norm(hidden, w["hidden_norm.weight"]), norm(embed, w["embed_norm.weight"])),
        dim=-1,
    )
    is_local = depth in shape.mtp_local_layer_ids
    window = shape.sliding_window if is_local else None
    x = block(both @ w["input_proj.weight"].T, under(w, "transformer_block."), window)
    return x @ tensors["model.llm.unembed.weight"].T
