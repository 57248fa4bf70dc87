"""INT8 state: whatever form the public ops take here, they leave the reference's bits.

Run once more under Triton's interpreter by test_kernels_interpreter.py; on a machine with a GPU the same
tests run the kernels there.
"""

import struct
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiercache_kernels import dequantise, ops, quantise, reference
from tiercache_kernels.testing import poisoned, same, spaced

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (torch.float32, torch.bfloat16)
FLOAT_MAX = torch.finfo(torch.float32).max
NAN_WITH_PAYLOAD = torch.tensor([0x7FC000FF], dtype=torch.int32).view(torch.float32)
"""Its low bits would end in the values of a kernel that does not look."""


@dataclass(frozen=True)
class Case:
    """A pool of state with two slots more than are used, and where they go."""

    source: Tensor
    source_slots: Tensor
    target_slots: Tensor
    target_count: int
    scale_dtype: torch.dtype

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Return poisoned qdata and scale, with gaps."""
        layers, _, heads, d_v, d_k = self.source.shape
        device = str(self.source.device)
        qdata = spaced(layers, self.target_count, heads, d_v, d_k, dtype=torch.int8, device=device)
        scale = spaced(
            layers, self.target_count, heads, 1, d_k, dtype=self.scale_dtype, device=device
        )
        return qdata, scale


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d_v, d_k = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    source_count, target_count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    count = draw(st.integers(0, min(source_count, target_count)))
    device = draw(st.sampled_from(DEVICES))
    dice = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    source = spaced(
        layers, source_count, heads, d_v, d_k, dtype=draw(st.sampled_from(FLOATS)), device=device
    )
    source.copy_(state((layers, source_count, heads, d_v, d_k), draw(KINDS), dice))
    return Case(
        source,
        torch.randperm(source_count, generator=dice)[:count],
        torch.randperm(target_count, generator=dice)[:count],
        target_count,
        draw(st.sampled_from(SCALES)),
    )


KINDS = st.sampled_from(["plain", "spread", "ties", "holes", "broken", "edges"])


def state(shape: tuple[int, ...], kind: str, dice: torch.Generator) -> Tensor:
    """Return values: of one size, of all sizes, on ties, with zero channels, with NaN, at the edges."""
    values = torch.randn(shape, generator=dice)
    columns = (*shape[:3], 1, shape[4])
    match kind:
        case "spread":
            values *= torch.exp2(torch.randint(-140, 120, columns, generator=dice).float())
        case "ties":  # Multiples of half a step, in channels whose largest value is 127 steps.
            values = torch.randint(-254, 255, shape, generator=dice) / 2
            values[..., :1, :] = 127
            values *= torch.exp2(torch.randint(-60, 60, columns, generator=dice).float())
        case "holes":
            values *= torch.randint(0, 2, columns, generator=dice)
        case "broken":
            bad = torch.cat(
                (torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0]), NAN_WITH_PAYLOAD)
            )
            chosen = torch.randint(0, 200, shape, generator=dice)
            values = torch.where(chosen < 5, bad[chosen.clamp(max=4)], values)
        case "edges":
            edges = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 1e-30, 1.7e-28, 1e30, FLOAT_MAX])
            values = edges[torch.randint(0, len(edges), shape, generator=dice)]
    return values


@settings(deadline=None, max_examples=60)
@given(cases())
def test_quantise_leaves_the_bits_of_the_reference(case: Case) -> None:
    qdata, scale = case.outputs()
    quantise(case.source, case.source_slots, qdata, scale, case.target_slots)
    expected_qdata, expected_scale = case.outputs()
    reference.quantise(
        case.source, case.source_slots, expected_qdata, expected_scale, case.target_slots
    )
    assert same(scale, expected_scale)
    assert same(qdata, expected_qdata)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_dequantise_leaves_the_bits_of_the_reference(case: Case) -> None:
    qdata, scale = case.outputs()
    reference.quantise(case.source, case.source_slots, qdata, scale, case.target_slots)
    restored, expected = (torch.full_like(case.source, torch.nan) for _ in range(2))
    dequantise(qdata, scale, case.target_slots, restored, case.source_slots)
    reference.dequantise(qdata, scale, case.target_slots, expected, case.source_slots)
    assert same(restored, expected)


@settings(deadline=None, max_examples=30)
@given(cases())
def test_other_slots_are_not_touched(case: Case) -> None:
    qdata, scale = case.outputs()
    before = qdata.clone(), scale.clone()
    quantise(case.source, case.source_slots, qdata, scale, case.target_slots)
    others = [slot for slot in range(case.target_count) if slot not in case.target_slots.tolist()]
    assert same(qdata[:, others], before[0][:, others])
    assert same(scale[:, others], before[1][:, others])


def one(values: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise and restore one `[d_v, d_k]`; return its values, scales and what came back."""
    source = values[None, None, None].to(DEVICES[-1])
    qdata = poisoned(*source.shape, dtype=torch.int8, device=DEVICES[-1])
    scale = poisoned(1, 1, 1, 1, source.shape[-1], dtype=scale_dtype, device=DEVICES[-1])
    restored = poisoned(*source.shape, dtype=source.dtype, device=DEVICES[-1])
    first = torch.tensor([0])
    quantise(source, first, qdata, scale, first)
    dequantise(qdata, scale, first, restored, first)
    return qdata[0, 0, 0].cpu(), scale[0, 0, 0, 0].cpu(), restored[0, 0, 0].cpu()


def test_a_scale_belongs_to_one_d_k_and_spans_d_v() -> None:
    """The other axis would give a tensor of the same shape, and models that hardly differ."""
    size = 32
    columns = torch.exp2(torch.arange(size).float())
    values = columns.expand(size, size).contiguous()
    qdata, scale, _ = one(values)
    assert torch.equal(scale, columns / 127)
    assert (qdata == 127).all()
    qdata, scale, _ = one(values.T.contiguous())
    assert torch.equal(scale, columns.max().expand(size) / 127)
    assert (qdata[-1] == 127).all()
    assert (qdata[0] == 0).all()


def single(value: float) -> float:
    """Round to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def test_values_are_divided_and_not_multiplied_by_an_inverse() -> None:
    """x / s and x * (1 / s) differ, and differ after rounding where x / s is a tie."""
    dice = torch.Generator().manual_seed(7)
    scale = torch.rand(4096, generator=dice) + 0.5
    steps = torch.randint(0, 126, (4096,), generator=dice) + 0.5
    values = torch.stack((scale * 127, scale * steps))
    divisor = values[0] / 127
    divided = (values[1] / divisor).round()
    multiplied = (values[1] * (1 / divisor)).round()
    assert (divided != multiplied).sum() > 100
    qdata, found, _ = one(values)
    assert torch.equal(found, divisor)
    assert torch.equal(qdata[1].float(), divided)
    plain = [round(single(x / s)) for x, s in zip(values[1].tolist(), found.tolist(), strict=True)]
    assert qdata[1].tolist() == plain


def hard_quotients() -> list[tuple[float, float]]:
    """Return values and scales whose quotient is all but halfway between a tie and its neighbour.

    There a quotient that is wrong in its last bit is wrong by a whole step. The midpoints are odd numbers
    of 25 bits; scales of 24 bits are solved for that leave a remainder of a unit or two.
    """
    found = []
    for k in range(127):
        shift = 25 - (2 * k + 1).bit_length()
        for midpoint in (((2 * k + 1) << shift) - 1, ((2 * k + 1) << shift) + 1):
            for modulus in (1 << 24, 1 << 25):
                for remainder in (-2, -1, 1, 2):
                    scale = remainder * pow(midpoint, -1, modulus) % modulus
                    value = (midpoint * scale - remainder) // modulus
                    if 1 << 23 <= scale < 1 << 24 and 1 << 22 <= value < 1 << 24:
                        found.append((value * modulus / 2.0 ** (shift + 1), float(scale)))
    return found


def test_quotients_are_right_to_the_last_bit() -> None:
    values, scales = torch.tensor(hard_quotients()).T
    largest = scales * 127
    reached = largest / 127 == scales
    assert reached.sum() > 300
    values, scales, largest = values[reached], scales[reached], largest[reached]
    quotients = values.double() / scales.double()
    assert ((quotients.frac() - 0.5).abs() < 1e-5).all()
    qdata, scale, _ = one(torch.stack((largest, values)))
    assert torch.equal(scale, scales)
    assert torch.equal(qdata[1].double(), quotients.float().double().round())


def test_the_scale_is_rounded_before_it_divides() -> None:
    """Otherwise what is stored belongs to another scale, and errs by it."""
    values = torch.randn(64, 200, generator=torch.Generator().manual_seed(5))
    qdata, scale, restored = one(values, torch.bfloat16)
    exact = values.abs().amax(dim=0) / 127
    assert torch.equal(scale, exact.bfloat16())
    assert torch.equal(qdata.float(), (values / scale.float()).round())
    assert not torch.equal(qdata.float(), (values / exact).round())
    assert ((restored - values).abs() <= scale.float() / 2 * 1.0001).all()


@pytest.mark.parametrize("scale_dtype", SCALES)
def test_zeros_stay_zeros(scale_dtype: torch.dtype) -> None:
    qdata, scale, restored = one(torch.tensor([[0.0, -0.0], [0.0, -0.0]]), scale_dtype)
    for found in (qdata, scale, restored):
        assert torch.equal(found, torch.zeros_like(found))


def test_a_scale_too_small_to_divide_by_is_zero() -> None:
    least = reference.SCALE_MIN * 127
    values = torch.tensor([[1e-45, 1e-30, least * 0.999, least]])
    qdata, scale, _ = one(values)
    assert scale.tolist() == [0, 0, 0, reference.SCALE_MIN]
    assert qdata.tolist() == [[0, 0, 0, 127]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, NAN_WITH_PAYLOAD[0]])
@pytest.mark.parametrize("scale_dtype", SCALES)
def test_a_broken_channel_comes_back_as_nan_and_alone(
    bad: float | Tensor, scale_dtype: torch.dtype
) -> None:
    values = torch.ones(5, 3)
    values[2, 1] = bad
    qdata, scale, restored = one(values, scale_dtype)
    assert scale.isnan().tolist() == [False, True, False]
    assert qdata[:, 1].tolist() == [0] * 5
    assert restored[:, 1].isnan().all()
    assert torch.equal(restored[:, [0, 2]], one(values[:, [0, 2]], scale_dtype)[2])


def test_the_largest_numbers() -> None:
    """A scale may be rounded up, so the very largest may come back as infinity."""
    values = torch.tensor([[FLOAT_MAX, FLOAT_MAX * 0.99], [-FLOAT_MAX, 0.0]])
    qdata, _, restored = one(values)
    assert qdata.tolist() == [[127, 127], [-127, 0]]
    assert restored[:, 0].tolist() == [torch.inf, -torch.inf]
    assert torch.allclose(restored[:, 1], values[:, 1])


def test_the_error_is_half_a_step_at_most() -> None:
    values = torch.linspace(-1, 1, 509)[:, None]
    _, scale, restored = one(values)
    assert (restored - values).abs().max() <= scale.item() / 2 + 2**-23


@pytest.mark.parametrize("far_axis", ["layers", "slots"])
def test_a_pool_may_be_larger_than_32_bits_count(far_axis: str) -> None:
    """Its memory is only reserved: a few tiles of it are touched."""
    size, far = 8 * 16, 2**30 + 4096
    strides = (far, size) if far_axis == "layers" else (size, far)
    buffer = torch.empty(2 * far + 3 * size, dtype=torch.int8, device=DEVICES[-1])
    pool = buffer.as_strided((3, 3, 1, 8, 16), (*strides, size, 16, 1))
    source = torch.randn(3, 1, 1, 8, 16, generator=torch.Generator().manual_seed(1))
    source = source.to(DEVICES[-1])
    scale = poisoned(3, 3, 1, 1, 16, dtype=torch.float32, device=DEVICES[-1])
    restored = poisoned(3, 1, 1, 8, 16, dtype=torch.float32, device=DEVICES[-1])
    first, last = torch.tensor([0]), torch.tensor([2])
    quantise(source, first, pool, scale, last)
    dequantise(pool, scale, last, restored, first)
    assert (restored - source).abs().max() < 0.02


@pytest.mark.skipif(DEVICES == ["cpu"], reason="needs a GPU")
def test_slots_may_be_on_the_device() -> None:
    source = torch.randn(2, 3, 1, 8, 16, device="cuda")
    qdata = poisoned(2, 3, 1, 8, 16, dtype=torch.int8, device="cuda")
    scale = poisoned(2, 3, 1, 1, 16, dtype=torch.float32, device="cuda")
    order = torch.tensor([2, 0, 1], device="cuda")
    quantise(source, order, qdata, scale, order)
    assert not scale.isnan().any()


def refused(source: Tensor, slots: Tensor, qdata: Tensor, scale: Tensor, targets: Tensor) -> str:
    with pytest.raises((ValueError, TypeError, IndexError)) as caught:
        quantise(source, slots, qdata, scale, targets)
    return str(caught.value)


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    source = torch.randn(2, 3, 2, 4, 5)
    qdata = poisoned(2, 3, 2, 4, 5, dtype=torch.int8)
    scale = poisoned(2, 3, 2, 1, 5, dtype=torch.float32)
    zero, both = torch.tensor([0]), torch.tensor([0, 1])
    assert "float16" in refused(source, zero, qdata, scale.half(), zero)
    assert "qdata is torch.uint8" in refused(source, zero, qdata.view(torch.uint8), scale, zero)
    assert "torch.int32" in refused(source.int(), zero, qdata, scale, zero)
    assert "expected [2, 3, 2, 1, 5]" in refused(source, zero, qdata, scale.mT, zero)
    assert "expected [2, 3, 2, 4, 5]" in refused(source, zero, qdata.mT, scale, zero)
    assert "[layers, slots, heads, d_v, d_k]" in refused(source[0], zero, qdata, scale, zero)
    assert "not dense" in refused(source.mT.contiguous().mT, zero, qdata, scale, zero)
    assert "source slots [3], of 3" in refused(source, torch.tensor([3]), qdata, scale, zero)
    assert "target slots [-1], of 3" in refused(source, zero, qdata, scale, torch.tensor([-1]))
    assert "int64" in refused(source, zero.int(), qdata, scale, zero)
    assert "1 source and 2 target" in refused(source, zero, qdata, scale, both)
    assert "twice" in refused(source, both, qdata, scale, torch.tensor([1, 1]))
    one = qdata[:, :1].expand(2, 3, 2, 4, 5)
    assert "overlaps itself" in refused(source, zero, one, scale, zero)
    assert "empty axis" in refused(source[:, :, :0], zero, qdata, scale, zero)
    assert (qdata == poisoned(1, dtype=torch.int8)).all()
    assert scale.isnan().all()


def test_the_form_is_chosen_by_where_the_tensors_are() -> None:
    """Under the interpreter the kernels run on the CPU; else they are for CUDA alone."""
    from tiercache_kernels.on_cpu import ops as on_cpu

    state = torch.zeros(1)
    if ops.runs_kernels(state):
        from triton import knobs

        assert knobs.runtime.interpret
    assert on_cpu.takes(state)
    assert on_cpu.takes(state.bfloat16())
    assert not on_cpu.takes(state.half())
    assert not on_cpu.takes(state.to("meta"))
