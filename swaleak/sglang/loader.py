"""Imports only the allocator package out of a source tree.

Its modules get an ``__import__`` of their own: names below ``sglang`` are looked up in the tree's
allocator package and in the shims, everything else is imported as usual. ``sys.modules`` never
hears of it, so several SGLangs live side by side, also beside an imported one.
"""

from __future__ import annotations

import builtins
import importlib.util
import linecache
from types import CodeType, ModuleType
from typing import Any

from swaleak.errors import TargetError, format_error as told
from swaleak.sglang import shims
from swaleak.sglang.source import ALLOCATOR, KERNELS, SourceTree

PACKAGE = ALLOCATOR.replace("/", ".")
CLASS = "SWATokenToKVPoolAllocator"


def load(tree: SourceTree, device: str) -> type[Any]:
    """Return the hybrid allocator class of a source tree, ready for ``device``.

    Runs the files of the allocator package that it imports, and on a CUDA device the file with
    its Triton kernels; nothing else of SGLang. Raises ``TargetError`` with what is missing.
    """
    module = _Importer(tree, device).module(f"{PACKAGE}.swa")
    try:
        found: type[Any] = getattr(module, CLASS)
    except AttributeError:
        raise TargetError(f"{tree.label}: {ALLOCATOR}/swa.py has no class {CLASS}") from None
    return found


class _Importer:
    """One private world of modules below ``sglang``."""

    def __init__(self, tree: SourceTree, device: str) -> None:
        self.tree = tree
        self.device = device
        self.modules: dict[str, ModuleType] = {}
        self.builtins = {**vars(builtins), "__import__": self.import_}
        self.triton = device.startswith("cuda") and importlib.util.find_spec("triton") is not None

    def import_(
        self,
        name: str,
        globals_: dict[str, Any] | None = None,
        locals_: dict[str, Any] | None = None,
        fromlist: tuple[str, ...] = (),
        level: int = 0,
    ) -> Any:
        """Stand in for ``__import__`` in the loaded files."""
        if level:
            package = (globals_ or {}).get("__package__", "")
            name = importlib.util.resolve_name("." * level + name, package)
        if name.split(".")[0] != "sglang":
            return builtins.__import__(name, globals_, locals_, fromlist, 0)
        if not fromlist:
            raise self.missing(name, "imported whole")
        module = self.module(name)
        for item in fromlist:
            if not hasattr(module, item) and self.path(f"{name}.{item}") in self.tree.files:
                setattr(module, item, self.module(f"{name}.{item}"))
            if item != "*" and not hasattr(module, item):
                raise self.missing(f"{name}.{item}")
        return module

    def module(self, name: str) -> ModuleType:
        """Return a module of this world, loading it if need be."""
        if name in self.modules:
            return self.modules[name]
        path = self.path(name)
        module = self.modules[name] = ModuleType(name)
        if path in self.tree.files and self.runs(path):
            module.__package__ = name if path.endswith("__init__.py") else name.rpartition(".")[0]
            module.__dict__["__builtins__"] = self.builtins
            self.execute(path, module)
        elif name in shims.MODULES:
            vars(module).update(shims.MODULES[name](self.device))
        else:
            del self.modules[name]
            raise self.missing(name)
        return module

    def path(self, name: str) -> str:
        """Return where in the tree a module is, or would be."""
        plain = name.replace(".", "/")
        package = f"{plain}/__init__.py"
        return package if package in self.tree.files else f"{plain}.py"

    def runs(self, path: str) -> bool:
        """Whether this file's own code is run, rather than a shim."""
        return path.startswith(f"{ALLOCATOR}/") or (path in KERNELS and self.triton)

    def execute(self, path: str, module: ModuleType) -> None:
        """Compile and run one file of the tree in ``module``."""
        text = self.tree.files[path]
        filename = f"{self.tree.place}/{path}"
        module.__file__ = filename
        # tracebacks, and Triton, want to read the source of what they are given
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        try:
            code: CodeType = compile(text, filename, "exec")
            exec(code, module.__dict__)
        except TargetError:
            raise
        except SyntaxError as error:
            raise TargetError(f"{self.tree.label}: {path}:{error.lineno}: {error.msg}") from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may raise whatever it likes
            reason = f"{path} cannot be loaded: {told(error)}"
            raise TargetError(f"{self.tree.label}: {reason}") from None

    def missing(self, name: str, how: str = "") -> TargetError:
        """Return the error for a name of SGLang that no shim provides."""
        return TargetError(
            f"{self.tree.label}: its allocator needs {name}{f', {how},' if how else ''} "
            f"which swaleak does not provide"
        )
