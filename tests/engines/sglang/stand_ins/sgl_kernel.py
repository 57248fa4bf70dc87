"""Stands in for SGLang's CPU kernels, of which there is no build for machines like the tests': plain torch.

Slow, and for the tiny models of the tests only. What is missing here raises when it is called.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch

from tests.engines.sglang.stand_ins import linear_attention


def _missing(name: str) -> Callable[..., object]:
    def call(*arguments: object, **named: object) -> object:
        raise NotImplementedError(f"the tests' stand-in for sgl_kernel has no {name}")

    return call


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


class _Below(ModuleType):
    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Callable[..., object] = getattr(linear_attention, name, _missing(name))
        return found


mamba = sys.modules[f"{__name__}.mamba"] = _Below(f"{__name__}.mamba")

_ops: Any = cast("Any", torch.library).Library("sgl_kernel", "FRAGMENT")


def _define(schema: str, act: Callable[..., object]) -> None:
    _ops.define(schema)
    _ops.impl(schema.partition("(")[0], act, "CompositeExplicitAutograd")


_define(
    "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
    "Tensor? correction_bias=None) -> (Tensor, Tensor)",
    linear_attention.topk_softmax,
)
_define(
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
    linear_attention.gating,
)
_define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, "
    "Tensor v, Tensor a, Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, "
    "Tensor cu_seqlens, bool use_qk_l2norm_in_kernel=True, float softplus_beta=1.0, "
    "float softplus_threshold=20.0, bool is_kda=False) -> Tensor",
    linear_attention.decode_step,
)
