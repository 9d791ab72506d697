"""The house: imports run one way, and the image installs what the Dockerfile names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from typer.core import TyperCommand

from tests.conftest import ROOT

# upstream first; a file may import from its own room and from rooms before it
ROOMS = (
    "errors",
    "files",
    "scenario",
    "allocator",
    "targets",
    "checker",
    "explorer",
    "trace",
    "live",
    "benchmark",
    "log_diagnosis",
    "report",
    "cli_options",
    "cli_app",
    "cli_cases",
    "cli",
    "__main__",
)


def imports() -> dict[str, set[str]]:
    """Return module -> modules of ours it imports, also inside functions; not for types only."""
    graph: dict[str, set[str]] = {}
    for path in (ROOT / "swaleak").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for inner in ast.walk(node)
        }
        found = graph.setdefault(module, set())
        for node in ast.walk(tree):
            if id(node) in for_types:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name.startswith("swaleak.")}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("swaleak"):
                assert node.level == 0, f"{module}: relative import"
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
                found.add(str(node.module))
    return {module: {name for name in used if name in graph} for module, used in graph.items()}


def room(module: str) -> int:
    return -1 if module == "swaleak" else ROOMS.index(module.split(".")[1])


def test_no_import_runs_back_up() -> None:
    graph = imports()
    assert len(graph) > 20
    back = [(a, b) for a, used in graph.items() for b in used if room(b) > room(a)]
    assert back == []


def test_no_two_files_import_each_other() -> None:
    graph = imports()
    reach = {module: set(used) for module, used in graph.items()}
    for _ in graph:
        for used in reach.values():
            used |= {further for near in list(used) for further in reach[near]}
    assert [module for module, used in reach.items() if module in used] == []


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions and classes, but for commands and what others call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            called_by_name = any("app." in ast.unparse(d) for d in node.decorator_list)
            called_by_name |= hasattr(TyperCommand, node.name)
            if not called_by_name and not node.name.startswith("__"):
                yield node.name


def test_nothing_is_there_for_the_tests_alone() -> None:
    files = {path: path.read_text() for path in (ROOT / "swaleak").rglob("*.py")}
    users = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").glob("*.py")]
    users.append(ROOT / "pyproject.toml")  # entry points
    words = Counter(
        word
        for text in (*files.values(), *(path.read_text() for path in users))
        for word in re.findall(r"\w+", text)
    )
    dead = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in files.items()
        for name in defined(ast.parse(text))
        # what SGLang's code reads of a request is named there, not here
        if words[name] < 2 and path.name != "requests.py"
    ]
    assert dead == []


DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_dockerfile_copies_what_exists_and_what_the_build_context_lets_through() -> None:
    let_through = (ROOT / ".dockerignore").read_text()
    copied = [
        word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M) for word in line.split()
    ]
    assert set(copied) == {"pyproject.toml", "README.md", "LICENSE", "swaleak", "scenarios"}
    assert all((ROOT / name).exists() for name in copied)
    assert all(f"!{name}\n" in let_through for name in copied)


def test_readme_and_dockerfile_name_the_same_image() -> None:
    [image] = re.findall(r"^ARG SGLANG_IMAGE=(\S+)$", DOCKERFILE, re.M)
    named = set(re.findall(r"lmsysorg/sglang:\S+\b", (ROOT / "README.md").read_text()))
    assert named == {image}


def test_the_image_installs_this_and_replaces_nothing(tmp_path: Path) -> None:
    """The Dockerfile's own line, in an environment that has torch, typer and rich already."""
    environment = tmp_path / "image"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    here = next(Path(p) for p in sys.path if (Path(p) / "torch").is_dir())
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "image.pth").write_text(f"{here}\n")
    [line] = re.findall(r"^RUN (.+)$", DOCKERFILE, re.M)
    found = (
        "import importlib.metadata as m, torch, typer, rich, packaging\n"
        "for n in ('torch', 'typer', 'rich', 'packaging'):\n"
        "    print(n, m.version(n), m.distribution(n).locate_file(''))\n"
    )

    def ask(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = ask(str(python), "-c", found)
    ask("bash", "-c", f"cd {ROOT} && {line.replace('python3', str(python))}")
    assert ask(str(python), "-c", found) == before
    new = {path.name for path in site.iterdir()} - {"image.pth"}
    assert {name.split("-")[0] for name in new if name != "__pycache__"} <= {
        "swaleak",
        "pip",
        "setuptools",
        "_distutils_hack",
        "distutils",
        "pkg_resources",
    }
    listed = ask(str(environment / "bin" / "swaleak"), "list", "--format", "json")
    assert '"tombstone-recovery"' in listed
    assert (site / "swaleak" / "scenarios" / "tombstone-recovery.toml").is_file()
