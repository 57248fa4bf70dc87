"""Every family, saved to a node and resumed from it: bit for bit the run that was never interrupted."""

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tiercache.state import Chain
from tiercache.testing.families import FAMILIES, build
from tiercache.testing.local import LocalClient, LocalNode
from tiercache_transformers import hf
from tiercache_transformers.identity import namespace_of
from tiercache_transformers.layout import form_of
from tiercache_transformers.state import restore, snapshot

torch.set_num_threads(1)

BLOCK = 16
BOUNDARY = 37
TOKENS = torch.randint(3, 256, (48,), generator=torch.Generator().manual_seed(7)).tolist()


def steps(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
    """One call per token."""
    return torch.stack([hf.forward(model, [token], cache) for token in tokens])


def chunk(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
    """One call for all of them."""
    return hf.forward(model, tokens, cache)


CASES = [(name, torch.float32) for name in FAMILIES] + [
    (name, torch.bfloat16) for name in ("kimi_linear", "qwen3_next", "nemotron_h", "qwen4_exp")
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).split(".")[-1])
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    form = form_of(model, BLOCK)
    namespace = namespace_of(model, form.layout, "token ids", name=name, revision="seed-0")
    client = LocalClient(LocalNode(), namespace, form.layout)
    prefill = chunk if FAMILIES[name].chunks else steps
    for number, run in enumerate((steps, chunk) if FAMILIES[name].chunks else (steps,)):
        cache = hf.new_cache(model)
        prefill(model, TOKENS[:BOUNDARY], cache)
        client.save("first", Chain(TOKENS[:BOUNDARY], BLOCK), snapshot(cache, form, 0, BOUNDARY))
        expected = run(model, TOKENS[BOUNDARY:], cache)
        with client.plan(f"later {number}", Chain(TOKENS, BLOCK)) as plan:
            assert plan.boundary == BOUNDARY
            resumed = restore(model, form, plan.boundary, plan.blobs)
        assert torch.equal(run(model, TOKENS[BOUNDARY:], resumed), expected), run.__name__
