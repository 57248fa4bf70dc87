"""What the tidiness tests look at: the project's own files, read once."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tiercache", "adapters", "kernels", "tests", "ops", "docs", ".ci")
MADE = {"__pycache__", ".venv", ".git", "build", "dist", "bench-results"}


def own_files() -> Iterator[Path]:
    for path in ROOT.iterdir():
        if path.is_file() and path.suffix != ".new" and path.name != ".coverage":
            yield path
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT)
            if path.is_file() and not MADE & set(inside.parts):
                yield path


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def texts() -> Mapping[str, str]:
    """The text of every file of the project that is text, by its path from the root."""
    found: dict[str, str] = {}
    for path in sorted(own_files()):
        try:
            found[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # Weights and other bytes.
    return found


@pytest.fixture(scope="session")
def trees(texts: Mapping[str, str]) -> Mapping[str, ast.Module]:
    """The syntax tree of every Python file of the project, by its path from the root."""
    return {path: ast.parse(text, path) for path, text in texts.items() if path.endswith(".py")}
