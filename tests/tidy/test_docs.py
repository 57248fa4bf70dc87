"""Documents that cannot be wrong without a red test."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import typer
from typer.core import TyperGroup

from tiercache.cli.app import app
from tiercache.config import Settings, document

GATES = {"test", "cover", "fmt-check", "lint", "types", "test-engines"}


def targets(makefile: str) -> dict[str, str]:
    """Return each target of the Makefile with the text after its colon."""
    return dict(re.findall(r"^([a-z-]+):(.*)$", makefile, re.MULTILINE))


def code(text: str) -> str:
    """Return the code in a Markdown text."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]*`", text, re.DOTALL))


def verbs(text: str) -> list[str]:
    """Return the targets that `make ...` in some code names, in order."""
    named = re.findall(r"(?:^|[`\n$]) ?make ((?:[a-z-]+ ?)+)", text)
    return [verb for words in named for verb in words.split()]


def test_every_module_says_what_it_is(trees: Mapping[str, ast.Module]) -> None:
    silent = [path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert not silent, "\n".join(silent)


def test_the_settings_are_documented_as_they_are(texts: Mapping[str, str]) -> None:
    assert texts["docs/config.md"] == document(), "run `make docs`"


def test_every_setting_is_read_somewhere(trees: Mapping[str, ast.Module]) -> None:
    """A documented key that nobody reads is a lie."""
    read = {
        node.attr
        for path, tree in trees.items()
        if path.startswith("tiercache/") and path != "tiercache/tables.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    for table in msgspec.structs.fields(Settings):
        keys = {key.name for key in msgspec.structs.fields(getattr(Settings(), table.name))}
        assert keys <= read, f"[{table.name}]: nobody reads {sorted(keys - read)}"


def links(text: str) -> Iterator[str]:
    without_code = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", without_code)


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def test_links_lead_somewhere(root: Path, texts: Mapping[str, str]) -> None:
    broken = []
    for path, text in texts.items():
        if not path.endswith(".md"):
            continue
        for link in links(text):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            there = (root / path).parent / target if target else root / path
            if not there.exists():
                broken.append(f"{path}: {link}")
            elif anchor and anchor not in anchors(there.read_text(encoding="utf-8")):
                broken.append(f"{path}: {link}: no such heading")
    assert not broken, "\n".join(broken)


def test_files_that_documents_name_exist(root: Path, texts: Mapping[str, str]) -> None:
    missing = [
        f"{path}: {name}"
        for path, text in texts.items()
        if path.endswith(".md") and path != "CHANGELOG.md"
        for name in re.findall(r"`((?:tiercache|tests|docs|ops|adapters)/[\w./-]+)`", text)
        if not (root / name).exists()
    ]
    assert not missing, "\n".join(missing)


def test_every_document_is_on_the_map(texts: Mapping[str, str]) -> None:
    documents = {path for path in texts if path.startswith("docs/")}
    assert documents <= set(links(texts["ARCHITECTURE.md"]))


def test_every_command_is_documented(texts: Mapping[str, str]) -> None:
    named = set(re.findall(r"^\| `([a-z]+)", texts["docs/cli.md"], re.MULTILINE))
    commands = typer.main.get_command(app)
    assert isinstance(commands, TyperGroup)
    assert commands.commands.keys() <= named


def test_the_readme_has_two_commands(texts: Mapping[str, str]) -> None:
    assert verbs(code(texts["README.md"]))[:2] == ["demo", "test"]
    for path in ("README.md", "ARCHITECTURE.md", "STYLE.md", "docs/dependencies.md"):
        assert set(verbs(code(texts[path]))) <= targets(texts["Makefile"]).keys(), path


def test_ci_runs_what_check_runs_and_the_readme_first(texts: Mapping[str, str]) -> None:
    made = verbs(re.sub(r"(?m)^#.*$", "", texts[".ci/run"]))
    assert made[0] == "test"
    assert sorted(made) == sorted(GATES)
    assert set(targets(texts["Makefile"])["check"].split("##")[0].split()) == GATES


def test_the_changelog_has_its_form(texts: Mapping[str, str]) -> None:
    lines = texts["CHANGELOG.md"].splitlines()
    assert lines[0] == "# Changelog"
    heads = [line for line in lines if line.startswith("## ")]
    assert heads
    for head in heads:
        assert re.fullmatch(r"## (Unreleased|\d+\.\d+\.\d+ - (\d{4}-\d\d-\d\d|unreleased))", head)
    for line in lines[1:]:
        ok = not line or line.startswith(("## ", "### ", "- ", "  "))
        assert ok, f"{line!r} is neither a heading nor an entry"
