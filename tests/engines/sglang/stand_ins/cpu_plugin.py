"""Makes SGLang run on a CPU: copies between device and host pools, and a few norms, in plain torch.

`register` is what SGLang's own plugin mechanism calls in every process of a server.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def register() -> None:
    """Put plain torch where SGLang has CUDA or Triton only."""
    _host_pools()
    _norms()


def _module(name: str) -> Any:
    return importlib.import_module(f"sglang.{name}")


def _host_pools() -> None:
    _module("srt.mem_cache.pool_host.common")._cuda_host_register = lambda *given: None
    mha = _module("srt.mem_cache.pool_host.mha").MHATokenToKVPoolHost
    mha.backup_from_device_all_layer, mha.load_to_device_per_layer = _heads_out, _heads_in
    mla = _module("srt.mem_cache.pool_host.mla").MLATokenToKVPoolHost
    mla.backup_from_device_all_layer, mla.load_to_device_per_layer = _latent_out, _latent_in
    states = _module("srt.mem_cache.pool_host.mamba").MambaPoolHost
    states.backup_from_device_all_layer, states.load_to_device_per_layer = _states_out, _states_in


def _rows(pool: Any, buffer: Tensor, layer: int) -> Tensor:
    """Return a view [page, token, ...] or [token, ...] of one layer of a host buffer."""
    if pool.layout == "layer_first":
        return buffer[layer]
    return buffer[:, layer]


def _put(pool: Any, buffer: Tensor, layer: int, indices: Tensor, values: Tensor) -> None:
    rows = _rows(pool, buffer, layer)
    if pool.layout == "page_first_direct":
        rows[indices // pool.page_size, indices % pool.page_size] = values
    else:
        rows[indices] = values


def _take(pool: Any, buffer: Tensor, layer: int, indices: Tensor) -> Tensor:
    rows = _rows(pool, buffer, layer)
    if pool.layout == "page_first_direct":
        return rows[indices // pool.page_size, indices % pool.page_size]
    return rows[indices]


def _heads_out(self: Any, device_pool: Any, host: Tensor, device: Tensor, io_backend: str) -> None:
    for layer in range(self.layer_num):
        _put(self, self.kv_buffer[0], layer, host, device_pool.k_buffer[layer][device])
        _put(self, self.kv_buffer[1], layer, host, device_pool.v_buffer[layer][device])


def _heads_in(
    self: Any,
    device_pool: Any,
    host: Tensor,
    device: Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    device_pool.k_buffer[layer_id][device] = _take(self, self.kv_buffer[0], layer_id, host)
    device_pool.v_buffer[layer_id][device] = _take(self, self.kv_buffer[1], layer_id, host)


def _latent_out(self: Any, device_pool: Any, host: Tensor, device: Tensor, io_backend: str) -> None:
    for layer in range(self.layer_num):
        _put(self, self.kv_buffer, layer, host, device_pool.kv_buffer[layer][device])


def _latent_in(
    self: Any,
    device_pool: Any,
    host: Tensor,
    device: Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    device_pool.kv_buffer[layer_id][device] = _take(self, self.kv_buffer, layer_id, host)


def _states_out(
    self: Any, device_pool: Any, host: Tensor, device: Tensor, io_backend: str = "kernel"
) -> None:
    for layer in range(self.num_mamba_layers):
        self.temporal_buffer[host, layer, 0] = self.buffer_info.temporal[layer][device]
        for own, theirs in zip(self.conv_buffer, self.buffer_info.conv, strict=True):
            own[host, layer, 0] = theirs[layer][device]


def _states_in(
    self: Any,
    device_pool: Any,
    host: Tensor,
    device: Tensor,
    layer_id: int,
    io_backend: str = "kernel",
    *,
    is_draft: bool = False,
) -> None:
    self.buffer_info.temporal[layer_id][device] = self.temporal_buffer[host, layer_id, 0]
    for own, theirs in zip(self.conv_buffer, self.buffer_info.conv, strict=True):
        theirs[layer_id][device] = own[host, layer_id, 0]


def _norms() -> None:
    _module("kernels.ops.attention.fla.layernorm_gated").RMSNorm.forward = _gated_norm
    _module("kernels.ops.attention.fla.fused_norm_gate").FusedRMSNormGated.forward = _norm_gate
    elementwise = _module("kernels.ops.elementwise.elementwise")
    elementwise.fused_gate_sigmoid_mul = _gate_mul
    elementwise.fused_gate_sigmoid_mul_add = _gate_mul_add


def _normalised(self: Any, x: Tensor) -> Tensor:
    wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return wide if getattr(self, "weight", None) is None else wide * self.weight.float()


def _gated_norm(self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    wide = x.float()
    if z is not None and not self.norm_before_gate:
        wide = wide * functional.silu(z.float())
    wide = _normalised(self, wide)
    if z is not None and self.norm_before_gate:
        wide = wide * functional.silu(z.float())
    return wide.to(x.dtype)


def _norm_gate(self: Any, x: Tensor, g: Tensor, *given: object, **named: object) -> Tensor:
    gate = torch.sigmoid if getattr(self, "activation", "swish") == "sigmoid" else functional.silu
    return (_normalised(self, x.float()) * gate(g.float())).to(x.dtype)


def _gate_mul(hidden: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
    gate = torch.sigmoid((hidden.float() * weight.float()).sum(-1, keepdim=True))
    return (shared.float() * gate).to(shared.dtype)


def _gate_mul_add(hidden: Tensor, weight: Tensor, shared: Tensor, out: Tensor) -> None:
    out += _gate_mul(hidden, weight, shared)
