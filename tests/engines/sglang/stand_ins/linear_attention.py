"""Gated delta rule and short convolutions in plain torch, token by token, by their definitions."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "causal_conv1d_fn_cpu",
    "causal_conv1d_update_cpu",
    "chunk_gated_delta_rule_cpu",
    "decode_step",
    "gating",
    "topk_softmax",
]


def topk_softmax(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,  # noqa: FBT001
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights and numbers of each token's experts."""
    assert correction_bias is None
    weights, chosen = gating_output.float().softmax(-1).topk(topk, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen.to(torch.int32)


def gating(log_a: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay and the write strength of each token and head, with a batch axis."""
    decay = -log_a.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cache_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    **ignored: object,
) -> Tensor:
    """Convolve the sequences in `x` [channel, token], and leave each one's last columns in its slot."""
    assert conv_states is not None
    assert has_initial_state is not None
    assert cache_indices is not None
    assert query_start_loc is not None
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for number, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            slot = int(cache_indices[number])
            columns = _columns(conv_states, slot, x.shape[0])
            before = columns if bool(has_initial_state[number]) else torch.zeros_like(columns)
            joined = torch.cat([before, x[:, start:end].float()], 1)
            out[:, start:end] = _convolve(joined, weight, bias, activation).to(x.dtype)
            _keep(conv_states, slot, joined)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    **ignored: object,
) -> Tensor:
    """Convolve one token of each sequence in `x` [sequence, channel]."""
    assert conv_state_indices is not None
    out = torch.empty_like(x)
    for number, slot in enumerate(conv_state_indices.tolist()):
        if slot >= 0:
            columns = _columns(conv_states, slot, x.shape[1])
            joined = torch.cat([columns, x[number].float()[:, None]], 1)
            out[number] = _convolve(joined, weight, bias, activation)[:, -1].to(x.dtype)
            _keep(conv_states, slot, joined)
    return out


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    **ignored: object,
) -> tuple[Tensor, None, None]:
    """Run whole sequences; the final states are left in their slots."""
    assert initial_state is not None
    assert cu_seqlens is not None
    assert initial_state_indices is not None
    return _run((q, k, v, g, beta), initial_state, initial_state_indices, cu_seqlens), None, None


def decode_step(
    log_a: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = True,  # noqa: FBT001, FBT002
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Run one token of each sequence."""
    assert use_qk_l2norm_in_kernel
    assert (softplus_beta, softplus_threshold, is_kda) == (1.0, 20.0, False)
    g, beta = gating(log_a, a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), dt_bias)
    return _run((q, k, v, g, beta), initial_state_source, initial_state_indices, cu_seqlens)


def _run(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    states: Tensor,
    slots: Tensor,
    bounds: Tensor,
) -> Tensor:
    q, k, v, g, beta = tokens
    out = torch.zeros_like(v)
    repeat = v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5
    ends = bounds.tolist()
    for number, (start, end) in enumerate(pairwise(ends)):
        slot = int(slots[number])
        if slot < 0 or end <= start:
            continue
        state = states[slot].float().clone()
        for at in range(start, end):
            query = functional.normalize(q[0, at].float(), dim=-1).repeat_interleave(repeat, 0)
            key = functional.normalize(k[0, at].float(), dim=-1).repeat_interleave(repeat, 0)
            state = state * g[0, at].float().exp()[:, None, None]
            known = torch.einsum("hvk,hk->hv", state, key)
            news = (v[0, at].float() - known) * beta[0, at].float()[:, None]
            state = state + news[:, :, None] * key[:, None, :]
            out[0, at] = torch.einsum("hvk,hk->hv", state, query * scale).to(out.dtype)
        states[slot] = state.to(states.dtype)
    return out


def _convolve(
    joined: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    channels = joined.shape[0]
    kernel = weight.reshape(channels, 1, -1).float()
    offset = None if bias is None else bias.float()
    out = functional.conv1d(joined[None], kernel, offset, groups=channels)[0]
    return functional.silu(out) if activation in {"silu", "swish"} else out


def _columns(states: Tensor, slot: int, channels: int) -> Tensor:
    held = states[slot].float()
    return held if held.shape[0] == channels else held.t()


def _keep(states: Tensor, slot: int, joined: Tensor) -> None:
    channels = joined.shape[0]
    swapped = states.shape[1] != channels
    width = states.shape[1] if swapped else states.shape[2]
    tail = joined[:, -width:].to(states.dtype)
    states[slot] = tail.t() if swapped else tail
