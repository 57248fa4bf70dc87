"""The gate: what it measures, what it lets through, and that it sees each way to restore wrongly."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from tiercache.cli import quality_path
from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.cli.quality_path import Answers, Subject
from tiercache.client import Blob
from tiercache.device import CODECS
from tiercache.errors import ConfigError
from tiercache.testing.quality import (
    PLACES,
    Floor,
    Probe,
    Score,
    failures,
    probes,
    read_floors,
    score,
)
from tiercache.testing.quality.floors import SHIPPED
from tiercache.testing.quality.scores import Logits
from tiercache.testing.recall import MODELS, VOCABULARY
from tiercache_transformers.state import restore, take_blocks, take_states

torch.set_num_threads(1)

SEQUENCES = 12
PROBES = probes(SEQUENCES)
Wrong = Callable[[Probe, list[Blob]], list[Blob]]


# --- the probes


def test_probes_are_always_the_same_and_ask_everywhere() -> None:
    assert probes(3) == probes(3)
    asked = {PLACES[place] for probe in PROBES for place in probe.places}
    assert asked == set(PLACES)
    for probe in PROBES:
        tokens = (*probe.context, *probe.rest)
        for at, answer, place in zip(probe.asked, probe.answers, probe.places, strict=True):
            key = probe.rest[at]
            where = tokens.index(key)
            assert tokens[where + 1] == answer
            assert where < len(probe.context) + at
            if PLACES[place] == "straddle":
                assert where + 1 == len(probe.context)
            else:
                assert place == where * 3 // len(probe.context)


# --- the scores


def one_hot(tokens: Sequence[int]) -> Logits:
    return 20.0 * np.eye(VOCABULARY)[list(tokens)]


RIGHT = [one_hot(probe.answers) for probe in PROBES]


def test_what_equals_the_uninterrupted_run_costs_nothing() -> None:
    found = score(PROBES, RIGHT, RIGHT)
    assert found == Score(
        front=1.0, middle=1.0, back=1.0, straddle=1.0, agreement=1.0, kl=0.0, drop=0.0,
        questions=33 * SEQUENCES,
    )  # fmt: skip


def test_a_place_that_is_forgotten_shows_there() -> None:
    back = PLACES.index("back")
    forgotten = [
        one_hot(
            [
                0 if place == back else token
                for token, place in zip(p.answers, p.places, strict=True)
            ]
        )
        for p in PROBES
    ]
    found = score(PROBES, RIGHT, forgotten)
    assert (found.front, found.middle, found.back, found.straddle) == (1.0, 1.0, 0.0, 1.0)
    assert found.drop == 1.0
    assert found.agreement < 1
    assert found.kl > 1


def test_the_divergence_is_the_textbooks() -> None:
    exact = [np.log(np.array([[0.5, 0.5]]))]
    ours = [np.log(np.array([[0.9, 0.1]])) + 3.0]
    probe = Probe((1, 2), (1,), (0,), (0,), (0,))
    expected = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    found = score([probe], exact, ours)
    assert found.kl == pytest.approx(expected)
    assert np.isnan(found.straddle)
    assert found.drop == 0.0


# --- the floors

FLOOR = Floor(agreement_min=0.998, kl_max=5e-5, drop_max=0.005, recall_min=(0.9, 0.9, 0.9, 0.9))
GOOD = Score(
    front=0.95, middle=0.95, back=0.95, straddle=1.0, agreement=1.0, kl=1e-6, drop=0.0, questions=9
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"agreement": 0.997}, ["agreement is 0.997, the floor 0.998"]),
        ({"kl": 6e-5}, ["KL is 6e-05, the floor 5e-05"]),
        ({"drop": 0.006}, ["loss of recall is 0.006, the floor 0.005"]),
        ({"straddle": 0.1}, ["recall straddle is 0.1, the floor 0.9"]),
        ({"front": 0.8, "back": 0.7}, ["recall front is 0.8, the floor 0.9",
                                       "recall back is 0.7, the floor 0.9"]),
        ({"kl": float("nan")}, ["KL is nan, the floor 5e-05"]),
    ],
)  # fmt: skip
def test_what_is_below_a_floor_is_said(changed: dict[str, float], said: list[str]) -> None:
    assert failures(FLOOR, msgspec.structs.replace(GOOD, **changed)) == said


def test_every_model_and_codec_has_a_floor() -> None:
    floors = read_floors()
    for name in MODELS:
        for codec in CODECS:
            floor = floors.of(name, codec)
            assert floor.agreement_min >= 0.998
            assert floor.kl_max <= 5e-5
            assert floor.drop_max <= 0.005
    with pytest.raises(ConfigError, match="no floor for codec 'int4'"):
        floors.of("mla1_kda2", "int4")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("version = 2\n[models]\n", "version 2"),
        ("version = 1\n", "models"),
        ("version = 1\n[models.a.b]\nagreement_min = 2\n", "cannot be read"),
        ("versio", "cannot be read"),
    ],
)
def test_floors_that_are_not_right_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "floors.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_floors(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_floors(tmp_path / "absent")


# --- the command


def gate(
    monkeypatch: pytest.MonkeyPatch, restored: Sequence[Logits], *args: str
) -> tuple[int, str, str]:
    """Run the command on logits that were measured otherwise."""

    def measure(
        names: Sequence[str], codecs: Sequence[str], asked: Sequence[Probe]
    ) -> dict[str, Answers]:
        exact = [one_hot(probe.answers) for probe in asked]
        found = [*restored, *exact[len(restored) :]]
        return {name: Answers(exact, dict.fromkeys(codecs, found)) for name in names}

    monkeypatch.setattr(quality_path, "measure", measure)
    result = CliRunner().invoke(app, ["quality", *args])
    return result.exit_code, result.stdout, result.stderr


def test_the_gate_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown, _ = gate(monkeypatch, [], "--model", "mla1_kda2")
    assert code == Exit.OK
    assert "mla1_kda2/int8" in shown
    assert "kda3" not in shown


def test_the_gate_closes_below_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [one_hot([0] * len(probe.answers)) for probe in probes()[:12]]
    code, shown, said = gate(monkeypatch, wrong, "--codec", "int8", "--json")
    assert code == Exit.CONTENT
    document = msgspec.json.decode(shown, type=dict[str, object])
    assert isinstance(document["failures"], list)
    assert any(str(line).startswith("mla1_kda2, int8: agreement") for line in document["failures"])
    assert "the floor" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--model", "gpt"), "--model: no 'gpt'"),
        (("--codec", "int4"), "--codec: no 'int4'"),
        (("--floors", "/tmp/there-is-no-such-file"), "cannot be read as floors"),
    ],
)
def test_wrong_usage_is_said(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], why: str
) -> None:
    code, _, said = gate(monkeypatch, [], *args)
    assert code == Exit.USAGE
    assert why in said


def test_own_floors_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "floors.toml"
    path.write_text(SHIPPED.read_text().replace("kl_max = 0.0", "kl_max = -1.0"))
    code, _, said = gate(monkeypatch, [], "--codec", "native", "--floors", str(path))
    assert code == Exit.CONTENT
    assert "KL is 0, the floor -1" in said


# --- what it catches, on a trained model


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.load("mla1_kda2")


def states_at(subject: Subject, tokens: Sequence[int]) -> list[Blob]:
    cache = DynamicCache(config=subject.model.config)
    subject.run(tokens, cache)
    return take_states(cache, subject.form, len(tokens))


def measured(subject: Subject, wrong: Wrong) -> Score:
    exact, found = [], []
    for probe in PROBES:
        boundary = len(probe.context)
        cache = DynamicCache(config=subject.model.config)
        subject.run(probe.context, cache)
        blobs = take_blocks(cache, subject.form, 0, boundary)
        states = wrong(probe, take_states(cache, subject.form, boundary))
        exact.append(subject.answer(probe, cache))
        again = restore(subject.model, subject.form, boundary, [*blobs, *states])
        found.append(subject.answer(probe, again))
    return score(PROBES, exact, found)


def older(subject: Subject, part: str, tokens: int) -> Wrong:
    """The state of one part, from some tokens before the boundary."""

    def wrong(probe: Probe, states: list[Blob]) -> list[Blob]:
        before = {b.part: b for b in states_at(subject, probe.context[:-tokens])}
        return [
            replace(before[part], end=blob.end) if blob.part == part else blob for blob in states
        ]

    return wrong


def without(part: str) -> Wrong:
    """The state of one part is zero."""
    return lambda _, states: [
        replace(blob, data=memoryview(bytes(blob.data.nbytes))) if blob.part == part else blob
        for blob in states
    ]


def test_a_right_restore_passes(subject: Subject) -> None:
    found = measured(subject, lambda _, states: states)
    assert failures(read_floors().of("mla1_kda2", "native"), found) == []


def test_a_lost_convolution_shows_only_across_the_boundary(subject: Subject) -> None:
    for wrong in (without("conv"), older(subject, "conv", 1)):
        found = measured(subject, wrong)
        assert found.straddle < 0.5
        assert min(found.front, found.middle, found.back) > 0.97
        said = failures(read_floors().of("mla1_kda2", "int8"), found)
        assert any("straddle" in line for line in said)


def test_an_old_recurrent_state_forgets_what_came_last(subject: Subject) -> None:
    found = measured(subject, older(subject, "recurrent", 16))
    assert found.back < 0.8 < min(found.front, found.middle)
    assert any("back" in line for line in failures(read_floors().of("mla1_kda2", "int8"), found))


def test_a_lost_recurrent_state_forgets_everything(subject: Subject) -> None:
    found = measured(subject, without("recurrent"))
    assert max(found.front, found.middle, found.back) < 0.15
