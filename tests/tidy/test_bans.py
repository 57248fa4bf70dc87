"""What is not written here, each with what to write instead."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping

import pytest

SHIPPED = ("tiercache/", "adapters/", "kernels/")

ALLOWED: dict[str, dict[str, str]] = {
    # ban -> path -> why it is right there
    "sleep": {},
    "environment": {"tiercache/config.py": "the one reader of the environment"},
    "task": {"tiercache/runtime/serve.py": "kept in a list; an error of one ends the node"},
    "broad except": {
        "adapters/sglang/tiercache_sglang/backend.py": "the top of an engine's call: it must not raise",
        "tiercache/runtime/server.py": "the top of a connection",
    },
}

NAMES_BANNED = {
    "Manager",
    "Controller",
    "Handler",
    "Helper",
    "Util",
    "Utils",
    "Impl",
    "Info",
    "Data",
}
STEMS_BANNED = {"manager", "controller", "handler", "helper", "helpers", "util", "utils", "common"}

CODE_FROM_BYTES = {
    "eval", "exec", "compile", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load",
    "marshal.loads", "shelve.open", "torch.load", "yaml.load", "yaml.unsafe_load", "dill.loads",
    "cloudpickle.loads",
}  # fmt: skip

Find = Callable[[str, ast.Module], Iterator[tuple[int, str]]]


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a name or an attribute of names, else ""."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
    return ""


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def check(trees: Mapping[str, ast.Module], ban: str, find: Find, fix: str) -> None:
    wrong = [
        f"{path}:{line}: {what}: {fix}"
        for path, tree in trees.items()
        if path not in ALLOWED.get(ban, {})
        for line, what in find(path, tree)
    ]
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_needed(trees: Mapping[str, ast.Module]) -> None:
    for ban, find in (
        ("sleep", sleeps),
        ("environment", environment),
        ("task", tasks),
        ("broad except", broad),
    ):
        for path, why in ALLOWED[ban].items():
            assert why
            assert list(find(path, trees[path])), f"{path} no longer needs its exception for {ban}"


def sleeps(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for name, node in calls(tree):
        if name in {"time.sleep", "sleep"}:
            yield node.lineno, name
        lasts = bool(node.args) and ast.unparse(node.args[0]) != "0"
        if name == "asyncio.sleep" and lasts and path.startswith("tests/"):
            yield node.lineno, name


def test_nothing_sleeps_to_wait(trees: Mapping[str, ast.Module]) -> None:
    check(trees, "sleep", sleeps, "wait for the thing itself, with a deadline")


def dice(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    seeded = {"Random", "default_rng", "Generator", "RandomState", "PCG64", "SystemRandom"}
    for name, node in calls(tree):
        module, _, function = name.rpartition(".")
        if module not in {"random", "np.random", "numpy.random"}:
            continue
        if function not in seeded or (function != "SystemRandom" and not node.args):
            yield node.lineno, name


def test_chance_has_a_seed(trees: Mapping[str, ast.Module]) -> None:
    check(trees, "dice", dice, "pass a random.Random(seed)")


def environment(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if path.startswith(SHIPPED):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and dotted(node) in {"os.environ", "os.getenv"}:
                yield node.lineno, dotted(node)


def test_only_the_settings_read_the_environment(trees: Mapping[str, ast.Module]) -> None:
    check(trees, "environment", environment, "make it a setting in tiercache/config.py")


def tasks(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for name, node in calls(tree):
        owner, _, function = name.rpartition(".")
        group = owner.split(".")[-1].lstrip("_")
        if function in {"create_task", "ensure_future"} and group not in {"group", "tasks"}:
            yield node.lineno, name


def test_every_task_has_an_owner(trees: Mapping[str, ast.Module]) -> None:
    check(trees, "task", tasks, "start it in a TaskGroup named `group` or `tasks`")


def prints(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if not path.startswith(("tiercache/cli/", "tests/bench/")):
        for name, node in calls(tree):
            if name == "print":
                yield node.lineno, name


def test_only_the_command_line_prints(trees: Mapping[str, ast.Module]) -> None:
    check(trees, "print", prints, "log it, or return it")


def code_from_bytes(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for name, call in calls(tree):
        if name in CODE_FROM_BYTES:
            yield call.lineno, name
        for keyword in call.keywords:
            if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                yield call.lineno, "allow_pickle"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and path.startswith(SHIPPED):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if module in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}:
                yield node.lineno, str(module)


def test_bytes_never_become_code(trees: Mapping[str, ast.Module]) -> None:
    check(trees, "code", code_from_bytes, "use msgspec, safetensors, yaml.safe_load")


def names(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    if STEMS_BANNED & set(stem.split("_")):
        yield 1, stem
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            words = set(re.findall(r"[A-Z][a-z]*\d*|[A-Z]+(?=[A-Z]|$)", node.name))
            if words & NAMES_BANNED or re.search(r"V\d+$", node.name):
                yield node.lineno, node.name


def test_names_say_what_a_thing_is(trees: Mapping[str, ast.Module]) -> None:
    check(trees, "names", names, "use a word of ARCHITECTURE.md")


def broad(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type else "everything"
        raises_again = isinstance(node.body[-1], ast.Raise)
        if re.search(r"\b(Exception|BaseException|everything)\b", caught) and not raises_again:
            yield node.lineno, f"except {caught}"


def test_exceptions_are_named(trees: Mapping[str, ast.Module]) -> None:
    check(trees, "broad except", broad, "name what may be raised, or end with a raise")


def test_broad_excepts_are_one_per_allowed_file(trees: Mapping[str, ast.Module]) -> None:
    assert len(ALLOWED["broad except"]) <= 2, "only the top of a connection or of an engine's call"
    for path in ALLOWED["broad except"]:
        assert len(list(broad(path, trees[path]))) == 1


def test_ignored_types_say_which(texts: Mapping[str, str], trees: Mapping[str, ast.Module]) -> None:
    wrong = [
        f"{path}:{token.start[0]}: {token.string}"
        for path in trees
        for token in tokenize.generate_tokens(io.StringIO(texts[path]).readline)
        if token.type == tokenize.COMMENT
        if re.search(r"#\s*type:\s*ignore(?!\[)", token.string)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("find", "path", "code"),
    [
        (sleeps, "tests/x.py", "import time\ntime.sleep(1)"),
        (sleeps, "tests/x.py", "await asyncio.sleep(0.1)"),
        (dice, "tiercache/x.py", "random.random()"),
        (dice, "tests/x.py", "random.Random()"),
        (dice, "tests/x.py", "np.random.default_rng()"),
        (environment, "tiercache/x.py", "os.environ['A']"),
        (environment, "tiercache/x.py", "os.getenv('A')"),
        (tasks, "tiercache/x.py", "asyncio.create_task(f())"),
        (tasks, "tiercache/x.py", "self.loop.create_task(f())"),
        (prints, "tiercache/x.py", "print(1)"),
        (code_from_bytes, "tests/x.py", "torch.load(f)"),
        (code_from_bytes, "tests/x.py", "np.load(f, allow_pickle=True)"),
        (code_from_bytes, "tiercache/x.py", "import pickle"),
        (names, "tiercache/x.py", "class CacheManager: pass"),
        (names, "tiercache/x.py", "class StoreV2: pass"),
        (names, "tiercache/x.py", "class IOHandler: pass"),
        (names, "tiercache/utils.py", ""),
        (broad, "tiercache/x.py", "try: f()\nexcept Exception: pass"),
        (broad, "tiercache/x.py", "try: f()\nexcept: pass"),
        (broad, "tiercache/x.py", "try: f()\nexcept (OSError, BaseException) as e: log(e)"),
    ],
)
def test_each_ban_finds_what_it_bans(find: Find, path: str, code: str) -> None:
    assert list(find(path, ast.parse(code)))


@pytest.mark.parametrize(
    ("find", "path", "code"),
    [
        (sleeps, "tests/x.py", "await asyncio.sleep(0)"),
        (dice, "tests/x.py", "random.Random(1).random()"),
        (environment, "tests/x.py", "os.environ['A']"),
        (tasks, "tiercache/x.py", "self._group.create_task(f())"),
        (names, "tiercache/x.py", "class Metadata: pass"),
        (names, "tiercache/x.py", "class Information: pass"),
        (broad, "tiercache/x.py", "try: f()\nexcept BaseException:\n  undo()\n  raise"),
    ],
)
def test_no_ban_finds_more(find: Find, path: str, code: str) -> None:
    assert not list(find(path, ast.parse(code)))


# --- text of any kind

UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b")
INDEX_HOST = re.compile(r"\b(pypi|pythonhosted|pytorch|npmjs|debian|ubuntu)\.(org|com|net)\b")
ABSOLUTE = re.compile(r"(?<![\w.:/<>})\]*$-])/([A-Za-z_][\w.-]*)/[\w.<{$-]")
SYSTEM_ROOTS = {
    "bin", "dev", "etc", "lib", "proc", "run", "sys", "tmp", "usr", "var",
    "api", "health", "hicache", "metrics", "ready", "some", "kv",
}  # fmt: skip
"""Where a path may start on any machine; the last line is HTTP's, invented ones, and the text of keys."""


def lines_with(texts: Mapping[str, str], wrong: Callable[[str], bool]) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in texts.items()
        if path not in {"LICENSE", "tests/tidy/test_bans.py"}
        for number, line in enumerate(text.splitlines(), 1)
        if wrong(line)
    ]


def test_nothing_is_left_for_later(texts: Mapping[str, str]) -> None:
    found = lines_with(texts, lambda line: bool(UNFINISHED.search(line)))
    assert not found, "\n".join(found)


def test_no_package_index_is_named(texts: Mapping[str, str]) -> None:
    found = lines_with(texts, lambda line: bool(INDEX_HOST.search(line)))
    assert not found, "\n".join(found)


def test_no_path_of_one_machine_is_named(texts: Mapping[str, str]) -> None:
    found = lines_with(
        texts, lambda line: any(root not in SYSTEM_ROOTS for root in ABSOLUTE.findall(line))
    )
    assert not found, "\n".join(found)
