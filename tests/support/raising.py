"""Assert which kind of error a call raises, so that its sentence can improve without a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from protocol.errors import ErrorKind, TrefoilError

E = TypeVar("E", bound=TrefoilError)


@contextmanager
def raises(kind: ErrorKind, error: type[E] = TrefoilError) -> Iterator[pytest.ExceptionInfo[E]]:  # type: ignore[assignment]
    """Expect exactly one `error` of `kind` from the block."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.kind is kind, f"{caught.value.kind}, not {kind}: {caught.value}"
