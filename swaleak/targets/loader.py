"""Runs the files of a source tree that allocator and caches are made of, and nothing else of it.

Its modules get an ``__import__`` of their own: names below ``sglang`` are looked up in the tree,
everything else is imported as usual. ``sys.modules`` keeps none of it, so several SGLangs live
side by side, also beside an imported one. What lies outside the tree is stood in for: by a shim, by
the one definition out of a file of helpers, or by a ``Placeholder``.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import linecache
import sys
from functools import cached_property
from types import ModuleType
from typing import Any

from swaleak.errors import StandInError, TargetError, format_error
from swaleak.targets import shims
from swaleak.targets.shims import Placeholder
from swaleak.targets.sources import ALLOCATOR, KERNELS, UTILS, SourceTree

PACKAGE = ALLOCATOR.replace("/", ".")
CLASS = "SWATokenToKVPoolAllocator"


class ModuleLoader:
    """The modules of one source tree, ready for ``device``.

    ``stand_ins``: the names outside the tree that its modules have asked for, each with how it is
    stood in for (``shim``, ``definition``, ``placeholder``). ``touched``: those of the placeholders
    that were looked at; whoever uses one is stopped.
    """

    def __init__(self, tree: SourceTree, device: str) -> None:
        self.tree = tree
        self.device = device
        self.modules: dict[str, ModuleType] = {}
        self.stand_ins: dict[str, str] = {}
        self.touched: set[str] = set()
        self.builtins = {**vars(builtins), "__import__": self.import_}
        # a copy of a few files does not say what else there is
        self.whole = "sglang/__init__.py" in tree.modules
        self.helpers_patched = any(path.startswith(f"{UTILS}/") for path in tree.patched)
        self.triton = device.startswith("cuda") and importlib.util.find_spec("triton") is not None

    @property
    def used_stand_ins(self) -> tuple[str, ...]:
        """The names outside the tree that a run has come across, placeholders only if touched."""
        provided = {name for name, how in self.stand_ins.items() if how != "placeholder"}
        return tuple(sorted(provided | self.touched))

    @cached_property
    def allocator_class(self) -> type[Any]:
        """The hybrid allocator class. Raises ``TargetError`` with what is missing."""
        module = self.module(f"{PACKAGE}.swa")
        found: type[Any] | None = getattr(module, CLASS, None)
        if found is None:
            raise TargetError(f"{self.tree.label}: {ALLOCATOR}/swa.py has no class {CLASS}")
        return found

    def import_(
        self,
        name: str,
        globals_: dict[str, Any] | None = None,
        locals_: dict[str, Any] | None = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        """Stand in for ``__import__`` in the loaded files."""
        if level:
            package = (globals_ or {}).get("__package__", "")
            name = importlib.util.resolve_name("." * level + name, package)
        if name.split(".")[0] != "sglang":
            return builtins.__import__(name, globals_, locals_, fromlist or (), 0)
        module = self.module(name)
        if fromlist and "*" in fromlist and isinstance(module, StandInModule):
            raise ImportError(f"from {name} import *, which swaleak does not run")
        for item in fromlist or ():
            if not hasattr(module, item) and self.exists(f"{name}.{item}"):
                setattr(module, item, self.module(f"{name}.{item}"))
        return module if fromlist else self.module("sglang")

    def module(self, name: str) -> ModuleType:
        """Return a module, loading it if need be. Raises ``ModuleNotFoundError``, ``TargetError``.

        Packages above it are not run.
        """
        if name in self.modules:
            return self.modules[name]
        path = self.path(name)
        if self.runs(path):
            module = self.modules[name] = ModuleType(name)
            module.__package__ = name if path.endswith("__init__.py") else name.rpartition(".")[0]
            module.__dict__["__builtins__"] = self.builtins
            self.execute(path, module)
        elif self.exists(name) or name in shims.MODULES or not self.whole:
            module = self.modules[name] = StandInModule(name, self)
        else:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return module

    def path(self, name: str) -> str:
        """Return where in the tree a module is, or would be."""
        plain = name.replace(".", "/")
        package = f"{plain}/__init__.py"
        return package if package in self.tree.modules else f"{plain}.py"

    def exists(self, name: str) -> bool:
        """Say whether SGLang has a module or a folder of this name."""
        return self.path(name) in self.tree.modules or name.replace(".", "/") in self._folders

    @cached_property
    def _folders(self) -> set[str]:
        parents = {path.rpartition("/")[0] for path in self.tree.modules}
        return parents | {f[:i] for f in parents for i, letter in enumerate(f) if letter == "/"}

    def runs(self, path: str) -> bool:
        """Say whether this file is run, rather than stood in for."""
        if path in KERNELS:
            return path in self.tree.files and self.triton
        helper = path.startswith(f"{UTILS}/") and path not in self.tree.added
        return path in self.tree.files and not helper

    def execute(self, path: str, module: ModuleType) -> None:
        """Compile and run one file of the tree in ``module``."""
        text = self.tree.files[path]
        filename = module.__file__ = f"{self.tree.place}/{path}"
        # tracebacks, and Triton, want to read the source of what they are given
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        name = module.__name__
        beside = sys.modules.get(name)
        sys.modules[name] = module  # a dataclass looks there for what its annotations mean
        try:
            exec(compile(text, filename, "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:  # a module may raise whatever it likes
            self.modules.pop(name)
            if isinstance(error, TargetError | KeyboardInterrupt):
                raise
            said = str(error) if isinstance(error, StandInError) else format_error(error)
            reason = f"{path} cannot be loaded: {said}"
            if isinstance(error, SyntaxError) and error.filename == filename:
                reason = f"{path}:{error.lineno}: {error.msg}"
            raise TargetError(f"{self.tree.label}: {reason}") from None
        finally:
            del sys.modules[name]
            if beside is not None:
                sys.modules[name] = beside


class StandInModule(ModuleType):
    """A module of SGLang that is not run. Its names are looked up when somebody asks for them."""

    def __init__(self, name: str, loader: ModuleLoader) -> None:
        super().__init__(name)
        self._loader = loader
        self.__dict__["__builtins__"] = loader.builtins

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        loader, full = self._loader, f"{self.__name__}.{name}"
        if loader.exists(full):
            found, how = loader.module(full), ""
        else:
            found, how = self._find(name)
        setattr(self, name, found)
        if how:
            loader.stand_ins[full] = how
        return found

    def _find(self, name: str) -> tuple[Any, str]:
        """Return what stands in for a name, and how."""
        loader, path = self._loader, self._loader.path(self.__name__)
        known = shims.names_in(self.__name__, loader.device)
        if name in known and not loader.helpers_patched:
            return known[name], "shim"
        if self._define(name):
            return self.__dict__[name], "definition"
        if name in known:
            return known[name], "shim"
        if path in loader.tree.files and path.startswith(f"{UTILS}/"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return Placeholder(f"{self.__name__}.{name}", loader.touched), "placeholder"

    def _define(self, name: str) -> bool:
        """Run the one statement of a file of helpers that defines ``name``, and what it needs."""
        if name in self.__dict__:
            return True
        for node in self._statements:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                module = self._loader.module(str(node.module))
                if isinstance(module, StandInModule) and module._define(name):
                    setattr(self, name, getattr(module, name))
                    return True
            elif name in _bound(node):
                for used in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {name}:
                    self._define(used)
                body: list[ast.stmt] = [ast.ImportFrom("__future__", [ast.alias("annotations")], 0)]
                code = ast.fix_missing_locations(ast.Module([*body, node], []))
                try:
                    exec(compile(code, self._loader.path(self.__name__), "exec"), self.__dict__)
                except (
                    ImportError,
                    StandInError,
                ):  # helpers import much that allocators do not need
                    full = f"{self.__name__}.{name}"
                    setattr(self, name, Placeholder(full, self._loader.touched))
                return True
        return False

    @cached_property
    def _statements(self) -> list[ast.stmt]:
        path = self._loader.path(self.__name__)
        return ast.parse(self._loader.tree.files.get(path, "")).body


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name.split(".")[0] for alias in names}
        case ast.Assign(targets=targets):
            return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
            return {name}
    return set()
