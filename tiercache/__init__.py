"""A tiered cache for the state of hybrid language models.

Importing this package loads neither torch nor an inference engine; see `tiercache.client` for the
ten lines that use it and `ARCHITECTURE.md` for the shape.
"""

__version__ = "0.1.0"
