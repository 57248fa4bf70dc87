"""What classes look like, read from sources without running them. No vLLM."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Signatures = Mapping[str, Mapping[str, Sequence[str]]]
"""By module, by name: the parameters of a function or method (`Class.method`), or the names that a class
has (`Class`): fields, properties, methods, and attributes that its `__init__` sets."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one module has: signatures by name, and by class the methods that must be overridden."""

    signatures: dict[str, list[str]]
    abstract: dict[str, list[str]]


def found_in(source: str) -> Found:
    """Return what a module's classes and functions look like."""
    found = Found({}, {})
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name):
                found.signatures[name] = sorted(set(_names(node)))
                methods = list(_functions(node.body))
                for method in methods:
                    found.signatures[f"{name}.{method.name}"] = _parameters(method)
                found.abstract[name] = [m.name for m in methods if _is_abstract(m)]
            case ast.FunctionDef(name=name):
                found.signatures[name] = _parameters(node)
            case _:
                pass
    return found


def _is_abstract(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).endswith("abstractmethod") for d in method.decorator_list)


def missing(needed: Signatures, found: Signatures) -> list[str]:
    """Return in words what is not as it is needed: methods must have exactly the parameters, classes at
    least the names."""
    faults = []
    for module, names in needed.items():
        there = found.get(module)
        if there is None:
            faults.append(f"{module} is gone")
            continue
        for name, wanted in names.items():
            have = there.get(name)
            if have is None:
                faults.append(f"{module}.{name} is gone")
            elif "." in name or not name[0].isupper():
                if list(have) != list(wanted):
                    faults.append(f"{module}.{name} takes {', '.join(have)}")
            elif lacking := sorted(set(wanted) - set(have)):
                faults.append(f"{module}.{name} has no {', '.join(lacking)}")
    return faults


def _functions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if arguments.vararg is not None:
        names.append(f"*{arguments.vararg.arg}")
    if arguments.kwarg is not None:
        names.append(f"**{arguments.kwarg.arg}")
    return names


def _names(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (t.id for t in targets if isinstance(t, ast.Name))
            case ast.FunctionDef(name=name):
                yield name
                if name == "__init__":
                    yield from _set_in(statement)
            case _:
                pass


def _set_in(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass
