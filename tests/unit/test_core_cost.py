"""What a prefill costs, and what well-known models weigh."""

import pytest

from tiercache.core.cost import EVEN, Work, work_of
from tiercache.models import MODELS


def test_a_prefill_is_a_linear_and_a_quadratic_part() -> None:
    work = Work(3.0, 2.0)
    assert work.flops(0) == 0.0
    assert work.flops(10) == 3 * 10 + 2 * 10 * 10 / 2
    assert work.extending(4, 10) == work.flops(10) - work.flops(4)
    assert EVEN.flops(7) == 7.0


@pytest.mark.parametrize(
    ("name", "state", "kv", "linear", "quadratic"),
    [
        # Reckoned by hand from the configurations.
        ("kimi-k3", 69 * (96 * 16384 * 4 + 3 * 36864 * 2), 27_648, 2.08e11, 24 * 2 * 96 * 320),
        ("kimi-linear-48b", 20 * (32 * 16384 * 4 + 3 * 12288 * 2), 8_064, 6e9, 7 * 2 * 32 * 320),
        ("qwen3-next-80b", 36 * (32 * 16384 * 4 + 3 * 8192 * 2), 24_576, 6e9, 12 * 2 * 16 * 512),
        ("falcon-h1-34b", 72 * (32 * 32768 * 4 + 3 * 5120 * 2), 147_456, 6.8e10, 72 * 2 * 20 * 256),
    ],
)
def test_models(name: str, state: int, kv: int, linear: float, quadratic: float) -> None:
    shape = MODELS[name]
    assert (shape.state_bytes, shape.kv_bytes) == (state, kv)
    assert (shape.work.linear, shape.work.quadratic) == (linear, quadratic)


def test_every_model_says_where_its_figures_come_from() -> None:
    assert len(MODELS) >= 12
    for name, shape in MODELS.items():
        assert shape.name == name
        assert shape.source
        assert 1e6 < shape.state_bytes < 1e9
        assert 4_000 < shape.kv_bytes < 200_000


def test_a_model_is_known_by_how_its_name_begins() -> None:
    known = tuple((name, shape.work) for name, shape in MODELS.items())
    assert work_of("moonshotai/Kimi-K3", known) is MODELS["kimi-k3"].work
    assert work_of("Qwen3.5-35B-A3B-Instruct", known) is MODELS["qwen3.5-35b"].work
    longer = (*known, ("kimi-k3.1", EVEN))
    assert work_of("Kimi_K3.1", longer) is EVEN
    assert work_of("gpt", known) is EVEN
    assert work_of("kimi", known) is EVEN
