"""What type checkers see of `import trefoil`, installed as `trefoil-stubs` (PEP 561).

A single module has no place for the mark of a typed package. `tests/test_packaging.py` compares this with `trefoil.py`.
"""

from collections.abc import Sequence

from benchmarks.library import *  # noqa: F403

__version__: str

def main() -> None: ...
def run(arguments: Sequence[str]) -> int: ...
