"""Where compiled kernels are kept between processes, for as long as no source changes that they may come from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from numba.core import caching

from gradwire import kernels, layout, randomness


def stamp_of(*sources: Path) -> str:
    """A hash of files, and of the Python files in folders."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


STAMP = stamp_of(*map(Path, (*kernels.__path__, layout.__file__, randomness.__file__)))
"""Numba itself looks at a kernel's own file only, and not at those of what it calls."""


class Index(caching.IndexDataCacheFile):
    """What is kept of one kernel."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except (AttributeError, ImportError):  # a class of its arguments has gone
            return {}


def keep(dispatcher: Any) -> Any:
    """Has a compiled function kept under :data:`STAMP`."""
    cache = dispatcher._cache
    cache._cache_file = Index(cache._cache_path, cache._impl.filename_base, STAMP)  # type: ignore[no-untyped-call]
    return dispatcher
