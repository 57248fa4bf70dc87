"""`tiercache quality`: is a compressed state good enough for a model? A gate for pipelines."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.exits import ContentError, UsageError
from tiercache.cli.text import as_json
from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from tiercache.testing.quality import Score

NEEDED = frozenset(
    {"numpy", "safetensors", "tiercache_kernels", "tiercache_transformers", "torch", "transformers"}
)
CODECS = ("native", "int8")
Scores = dict[str, dict[str, "Score"]]


def quality(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="NAME", help="A recall model; may be repeated [default: all]."
        ),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option("--codec", metavar="NAME", help="May be repeated [default: native and int8]."),
    ] = None,
    floors: Annotated[
        str,
        typer.Option(
            "--floors",
            metavar="FILE",
            help="Floors to reach [default: the shipped ones].",
            show_default=False,
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run trained models through the whole path, with and without compression; exit 1 below a floor."""
    try:
        from tiercache.cli import quality_path
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        raise ConfigError(
            f"the quality gate needs {error.name}, which is not installed: install tiercache from its "
            f"checkout with the extras `transformers` and `gpu`"
        ) from error
    from tiercache.device import CODECS as KNOWN
    from tiercache.testing.quality import failures, probes, read_floors, score
    from tiercache.testing.recall import MODELS

    models, codecs = model or list(MODELS), codec or list(CODECS)
    _known("--model", models, MODELS)
    _known("--codec", codecs, KNOWN)
    chosen = read_floors(Path(floors)) if floors else read_floors()
    limits = {(name, which): chosen.of(name, which) for name in models for which in codecs}
    asked = probes()
    scores: Scores = {
        name: {which: score(asked, found.exact, found.restored[which]) for which in codecs}
        for name, found in quality_path.measure(models, codecs, asked).items()
    }
    low = [
        f"{name}, {which}: {text}"
        for (name, which), floor in limits.items()
        for text in failures(floor, scores[name][which])
    ]
    if json:
        typer.echo(as_json({"scores": scores, "failures": low}))
    else:
        from tiercache.cli.views import console

        console().print(table(scores))
    if low:
        raise ContentError("; ".join(low))


def table(scores: Scores) -> "Table":
    """Return the scores for people."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("model/codec")
    for heading in ("front", "middle", "back", "straddle", "agreement", "KL", "questions"):
        shown.add_column(heading, justify="right")
    for name, by_codec in scores.items():
        for which, found in by_codec.items():
            shown.add_row(
                f"{name}/{which}",
                *(f"{value:.4f}" for value in (found.front, found.middle, found.back)),
                f"{found.straddle:.4f}",
                f"{found.agreement:.4f}",
                f"{found.kl:.2e}",
                f"{found.questions:,}",
            )
    return shown


def _known(option: str, given: list[str], names: Collection[str]) -> None:
    for name in given:
        if name not in names:
            raise UsageError(f"{option}: no {name!r}; there are {', '.join(names)}")
