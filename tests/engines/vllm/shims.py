"""What vLLM 0.32 lacks to run more families with prefix caching on a CPU. Test equipment, for one process.

Nothing here touches what the connector sees: groups, block tables, hand-offs and tensors are vLLM's.
"""

import ctypes
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch.nn import functional

Theirs: TypeAlias = Any
"""An object of vLLM, which has no types here."""


def register() -> None:
    """Let Mamba2 and latent attention run with prefix caching."""
    _mamba2()
    _latent_attention()
    _keep_weights()


def kimi_linear() -> None:
    """Let Kimi Linear run. Its modules are imported late: vLLM's CPU platform replaces Triton kernels by
    scanning what was imported, and must not find them."""
    # Two fused operations that exist for CUDA only.
    os.environ["VLLM_KIMI_K3_GEMM_AR"] = os.environ["VLLM_ENABLE_GEMM_RS"] = "0"
    from vllm.platforms.cpu import CpuPlatform

    replace = CpuPlatform.register_triton_kernel_overrides.__func__

    def register_triton_kernel_overrides(cls: Theirs) -> None:
        replace(cls)
        _kda()
        _kimi_convolution()
        _kimi_latent()
        _kimi_weights()

    CpuPlatform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)


def guessing() -> None:
    """Let hybrid models guess ahead: what moves states when guesses were accepted is for GPUs only."""
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    def precopy(
        self: Theirs, num_reqs: int, state_idx_gpu: Theirs, src_col_gpu: Theirs,
        token_bias_gpu: Theirs, idx_mapping: Theirs,
    ) -> None:  # fmt: skip
        assert idx_mapping is None
        columns = (state_idx_gpu.tolist(), src_col_gpu.tolist(), token_bias_gpu.tolist())
        for row, (to, source, bias) in enumerate(zip(*columns, strict=True)):
            if row < num_reqs and source >= 0 and source != to:
                _move_states(self, row, source, to, bias)

    def postprocess(
        self: Theirs, num_reqs: int, num_accepted_tokens_gpu: Theirs, mamba_state_idx_gpu: Theirs,
        num_scheduled_tokens_gpu: Theirs, num_computed_tokens_gpu: Theirs,
        num_draft_tokens_gpu: Theirs,
    ) -> None:  # fmt: skip
        self.num_accepted_tokens_out[:num_reqs] = num_accepted_tokens_gpu[:num_reqs]
        for row in range(num_reqs):
            accepted, source = int(num_accepted_tokens_gpu[row]), int(mamba_state_idx_gpu[row])
            running = int(num_computed_tokens_gpu[row] + num_scheduled_tokens_gpu[row])
            running -= int(num_draft_tokens_gpu[row])
            aligned = (running + accepted - 1) // self.block_size * self.block_size
            if aligned < running:
                continue
            to, bias = aligned // self.block_size - 1, aligned - running
            if source == to:
                self.num_accepted_tokens_out[row] = 1
            if source != to or bias:
                _move_states(self, row, source, to, bias)

    MambaSpecDecodeGPUContext.run_fused_precopy = precopy
    MambaSpecDecodeGPUContext.run_fused_postprocess = postprocess


def _move_states(context: Theirs, row: int, source: int, to: int, bias: int) -> None:
    """Move one request's states between columns of its block tables: a convolution's window is shifted
    by the guesses that were accepted, of recurrent states there is one for each guess."""
    for at in range(context.num_states):
        group = int(context.state_group_indices[at])
        start = int(context.block_table_ptrs[group]) + 4 * row * context.block_table_stride_req
        table = (ctypes.c_int32 * context.block_table_stride_req).from_address(start)
        base, stride = int(context.state_base_addrs[at]), int(context.state_block_strides[at])
        unit = int(context.state_inner_sizes[at]) * int(context.state_elem_sizes[at])
        if width := int(context.state_conv_widths[at]):
            origin = base + table[source] * stride + bias * unit
            unit *= width - bias
        else:
            origin = base + table[source + bias] * stride
        ctypes.memmove(base + table[to] * stride, origin, unit)


def _mamba2() -> None:
    # The mixer says that it can export a state from inside a prefill; the CPU kernel returns the last
    # one only. Without the claim, vLLM splits the prefill at the block, as it does elsewhere.
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def _latent_attention() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Theirs, config: Theirs) -> None:
        # Turned off without AMX, though the backend reads cached context well.
        cache, scheduler = config.cache_config, config.scheduler_config
        keep = (cache.enable_prefix_caching, scheduler.enable_chunked_prefill)
        tokens = scheduler.max_num_batched_tokens
        check(cls, config)
        cache.enable_prefix_caching, scheduler.enable_chunked_prefill = keep
        scheduler.max_num_batched_tokens = tokens

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    # A block of a hybrid model's pool is several of the kernel's.
    CPUMLABackend.supports_block_size = classmethod(
        lambda cls, tokens: tokens is None or tokens % 16 == 0
    )
    # The CPU operation ignores the stride of the keys it rotates in place, and turns other tokens' latents.
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def _keep_weights() -> None:
    # On CPUs with AVX-512 weights are packed and the plain ones dropped, which latent attention reads.
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: dispatch(
        layer, remove_weight=False
    )


def _kda_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    raw_gate, raw_beta, a_log, bias = gates
    q, k = functional.normalize(q.float(), dim=-1), functional.normalize(k.float(), dim=-1)
    x = raw_gate.float() + bias.view(raw_gate.shape[-2:])
    rate = a_log.float().exp()[:, None]
    decay = (
        -rate * functional.softplus(x)
        if lower_bound is None
        else lower_bound * torch.sigmoid(rate * x)
    )
    return q, k, decay, raw_beta.float().sigmoid()


def _kda_run(
    inputs: Sequence[torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one sequence: q, k, v and decay [T, H, D], beta [T, H], state [H, V, K] in float32."""
    q, k, v, decay, beta = inputs
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        state = state * decay[t].exp()[:, None, :]
        delta = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + torch.einsum("hv,hk->hvk", delta, k[t])
        out[t] = torch.einsum("hvk,hk->hv", state, q[t]) * q.shape[-1] ** -0.5
    return out, state


def _kda() -> None:
    import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn as layer
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda

    def chunk(
        q: Theirs, k: Theirs, v: Theirs, raw_g: Theirs, raw_beta: Theirs,
        A_log: Theirs,  # noqa: N803
        g_bias: Theirs, lower_bound: Theirs = None, initial_state: Theirs = None,
        cu_seqlens: Theirs = None, **_: Theirs,
    ) -> Theirs:  # fmt: skip
        gates = (raw_g[0], raw_beta[0], A_log, g_bias)
        queries, keys, decay, beta = _kda_inputs(q[0], k[0], gates, lower_bound)
        values = v[0].float()
        outs, states = [], []
        edges = cu_seqlens.tolist()
        for at, (start, end) in enumerate(pairwise(edges)):
            inputs = [x[start:end] for x in (queries, keys, values, decay, beta)]
            out, state = _kda_run(inputs, initial_state[at].float())
            outs.append(out)
            states.append(state)
        return torch.cat(outs).to(q.dtype)[None], torch.stack(states).to(initial_state.dtype)

    def decode(
        mixed_qkv: Theirs, raw_g: Theirs, raw_beta: Theirs,
        A_log: Theirs,  # noqa: N803
        dt_bias: Theirs, lower_bound: Theirs, initial_state: Theirs, state_indices: Theirs,
        **_: Theirs,
    ) -> Theirs:  # fmt: skip
        heads, width = raw_g.shape[2], raw_g.shape[3]
        q, k, v = mixed_qkv.view(mixed_qkv.shape[0], 3, heads, width).unbind(1)
        gates = (raw_g[0], raw_beta[0], A_log, dt_bias)
        queries, keys, decay, beta = _kda_inputs(q, k, gates, lower_bound)
        outs = []
        for at, slot in enumerate(state_indices.tolist()):
            inputs = [x[at : at + 1] for x in (queries, keys, v.float(), decay, beta)]
            out, state = _kda_run(inputs, initial_state[slot].float())
            initial_state[slot] = state.to(initial_state.dtype)
            outs.append(out)
        return torch.cat(outs).to(mixed_qkv.dtype)[None], initial_state

    def gather(state: Theirs, indices: Theirs, has: Theirs) -> Theirs:
        return state[indices.long()] * has.view(-1, *[1] * (state.ndim - 1)).to(state.dtype)

    kda.chunk_kda_with_fused_gate = chunk
    kda.fused_recurrent_kda_packed_decode = decode
    layer.gather_initial_states = gather
    layer.FusedRMSNormGated.forward_cpu = layer.FusedRMSNormGated.forward_native


def _kimi_convolution() -> None:
    # The CPU operations have fewer arguments.
    import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn as layer

    update, run = layer.causal_conv1d_update, layer.causal_conv1d_fn

    def updated(
        x: Theirs, *rest: Theirs, out: Theirs = None, validate_data: Theirs = None, **more: Theirs
    ) -> Theirs:
        return update(x.clone(), *rest, **more)

    def convolved(*rest: Theirs, metadata: Theirs = None, **more: Theirs) -> Theirs:
        return run(*rest, **more)

    layer.causal_conv1d_update = updated
    layer.causal_conv1d_fn = convolved


def _kimi_latent() -> None:
    from vllm import _custom_ops as operations
    from vllm.models.kimi_k3.nvidia import mla

    def insert(latent: Theirs, rope: Theirs, cache: Theirs, slots: Theirs) -> None:
        flat = cache.view(-1, cache.shape[-1])
        real = slots >= 0
        rows = torch.cat([latent, rope.reshape(rope.shape[0], -1)], -1)
        flat[slots[real].long()] = rows[real].to(cache.dtype)

    def keys(plain: Theirs, rope: Theirs) -> Theirs:
        rope = rope.reshape(rope.shape[0], 1, -1).expand(-1, plain.shape[1], -1)
        return torch.cat([plain, rope.to(plain.dtype)], -1)

    def prefill(
        q: Theirs, plain: Theirs, rope: Theirs, latent: Theirs, cache: Theirs, slots: Theirs,
        positions: Theirs = None, cos_sin_cache: Theirs = None,
    ) -> Theirs:  # fmt: skip
        assert cos_sin_cache is None
        insert(latent, rope, cache, slots)
        return keys(plain, rope)

    def decode(
        q: Theirs,
        q_rope: Theirs,
        latent: Theirs,
        rope: Theirs,
        cache: Theirs,
        slots: Theirs,
        **_: Theirs,
    ) -> Theirs:
        insert(latent, rope, cache, slots)
        return torch.cat([q, q_rope], -1)

    def context(
        src_cache: Theirs, dst: Theirs, block_table: Theirs, cu_seq_lens: Theirs, num_tokens: Theirs,
        seq_starts: Theirs, **_: Theirs,
    ) -> None:  # fmt: skip
        operations.gather_mla_context_cache_cpu(
            src_cache=src_cache, dst=dst[:num_tokens], block_table=block_table,
            starts=seq_starts, cu_seq_lens=cu_seq_lens,
        )  # fmt: skip

    mla.fused_mla_key_concat_kv_cache_insert = prefill
    mla.fused_mla_decode_q_concat_kv_cache_insert = decode
    mla.fused_mla_kv_concat = keys
    operations.gather_and_maybe_dequant_cache = context


def _kimi_weights() -> None:
    # Made-up weights are within 1e-3: outputs would not depend on the state.
    import vllm.model_executor.model_loader.dummy_loader as loader

    fill = loader.initialize_single_dummy_weight

    def wider(parameter: Theirs, **more: Theirs) -> Theirs:
        return fill(parameter, low=-0.15, high=0.15)

    loader.initialize_single_dummy_weight = wider
