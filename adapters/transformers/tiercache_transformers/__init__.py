"""tiercache for Hugging Face transformers: snapshot and restore of a `DynamicCache`, and a model that
resumes.

    form = form_of(model)
    namespace = namespace_of(model, form.layout, tokenizer, name="kimi-linear-48b")
    with Client.attach(socket, namespace, form.layout) as client:
        print(CachedModel(model, form, client).generate(tokens, 100))
"""

from tiercache_transformers.identity import namespace_of
from tiercache_transformers.layout import Form, form_of, layout_of
from tiercache_transformers.session import CachedModel, Generated, Pace, Prefilled
from tiercache_transformers.state import restore, snapshot, take_blocks, take_states

__all__ = [
    "CachedModel",
    "Form",
    "Generated",
    "Pace",
    "Prefilled",
    "form_of",
    "layout_of",
    "namespace_of",
    "restore",
    "snapshot",
    "take_blocks",
    "take_states",
]
