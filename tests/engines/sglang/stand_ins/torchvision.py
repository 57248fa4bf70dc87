"""Stands in for torchvision: SGLang imports it for images, which no test here sends.

The builds of torchvision on the index want another torch. Every module below it is this one.
"""

import sys
from types import ModuleType
from typing import Self

__version__ = "0.28.0"


class _Anything:
    """Takes part in definitions; fails when it is used."""

    def __init__(self, *arguments: object, **named: object) -> None:
        del arguments, named

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: object, **named: object) -> None:
        raise RuntimeError("there is no torchvision here")


class _Below(ModuleType):
    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


for _name in (
    "io",
    "ops",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    _full = f"{__name__}.{_name}"
    sys.modules[_full] = _Below(_full)
io, ops, transforms = (sys.modules[f"{__name__}.{name}"] for name in ("io", "ops", "transforms"))
for _name, _below in (("functional", "functional"), ("v2", "v2")):
    setattr(transforms, _name, sys.modules[f"{__name__}.transforms.{_below}"])
_v2 = sys.modules[f"{__name__}.transforms.v2"]
setattr(_v2, "functional", sys.modules[f"{__name__}.transforms.v2.functional"])  # noqa: B010
