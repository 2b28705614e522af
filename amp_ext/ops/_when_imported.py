"""Register with modules of torch without importing them."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def when_imported(name: str, register: Callable[[ModuleType], None]) -> None:
    """Call ``register`` with a module now, or as soon as it is imported."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        register(module)
    else:
        sys.meta_path.insert(0, _Finder(name, register))


class _Finder:
    def __init__(self, name: str, register: Callable[[ModuleType], None]) -> None:
        self.name, self.register = name, register

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is not None and (loader := spec.loader) is not None:
            load = loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:  # a second load does not register again
                    sys.meta_path.remove(self)
                    self.register(module)

            loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
