"""memtools in transformers: a KVPool behind `model.generate`, and a monitor for `Trainer`.

    pool = pool_for(model, max_tokens=2048, max_sequences=16)
    with PooledCache.for_model(model, pool) as cache:
        model.generate(input_ids, cache=cache, max_new_tokens=64)
    generate_group(model, input_ids, 16, pool, max_new_tokens=64, do_sample=True)

    Trainer(model, args, train_dataset=data, callbacks=[MemoryCallback()]).train()

Needs transformers 5.21 or newer.
"""

from typing import TYPE_CHECKING

from transformers import __version__ as _version

if tuple(int(part) for part in _version.split(".")[:2]) < (5, 21):
    raise ImportError(
        f"memtools needs transformers 5.21 or newer, and {_version} is installed: "
        "python -m pip install --upgrade transformers"
    )

from memtools.integrations.transformers._cache import PooledCache
from memtools.integrations.transformers._group import generate_group
from memtools.integrations.transformers._model import pool_for

if TYPE_CHECKING:
    from memtools.integrations.transformers._callback import MemoryCallback

__all__ = ["MemoryCallback", "PooledCache", "generate_group", "pool_for"]


def __getattr__(name: str) -> object:
    """Import MemoryCallback at its first use: its base class takes transformers a second."""
    if name != "MemoryCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memtools.integrations.transformers import _callback as callback

    return callback.MemoryCallback
