"""Releases by number: fetched once with the user's own pip, kept, and read from there."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from swaleak.errors import TargetError
from swaleak.targets.sources import RELEASES, from_release
from tests.conftest import Cli, wheel

NOWHERE = "http://127.0.0.1:9/simple"  # nobody listens there


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SWALEAK_CACHE", str(folder))
    return folder


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of the user's: the folder that holds the wheels, through pip's own words."""
    folder = wheel("0.5.18").parent
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", NOWHERE)


@pytest.mark.wheels
def test_fetched_once_then_read_without_a_network(
    cli: Cli, cache: Path, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = cli("check", "v0.5.18")
    assert (answer.code, answer.err) == (1, "")
    [kept] = cache.iterdir()
    with zipfile.ZipFile(kept) as archive:
        folders = {str(Path(name).parent) for name in archive.namelist()}
    assert kept.name == "sglang-0.5.18.zip" and kept.stat().st_size < 200_000
    assert folders == {
        "sglang",
        "sglang/srt/mem_cache/allocator",
        "sglang/kernels/ops/memory",
        "sglang-0.5.18.dist-info",
    }
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert cli("check", "0.5.18").out == answer.out


@pytest.mark.wheels
def test_a_release_that_does_not_exist(cli: Cli, cache: Path, shop: Path) -> None:
    answer = cli("check", "0.5.99")
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert answer.err.startswith("swaleak: unknown SGLang release '0.5.99'; did you mean '0.5.1")
    assert list(cache.iterdir()) == []


def test_no_network_is_said_in_one_line(cli: Cli, cache: Path, no_network: None) -> None:
    answer = cli("check", "0.5.18")
    assert (answer.code, answer.out) == (125, "")
    assert answer.err == (
        f"swaleak: sglang 0.5.18 is not in {cache} and pip cannot reach a package index; "
        f"give the path of a wheel instead\n"
    )
    assert list(cache.iterdir()) == []


def test_a_release_without_the_package(cli: Cli, cache: Path) -> None:
    answer = cli("repro", "--on", "0.5.12")
    assert (answer.code, answer.err, cache.exists()) == (
        125,
        f"swaleak: sglang 0.5.12 has no allocator package; it came with {RELEASES[0]}\n",
        False,
    )


@pytest.mark.wheels
def test_a_broken_download_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = wheel("0.5.18")
    cut = tmp_path / real.name
    cut.write_bytes(real.read_bytes()[:100_000])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(TargetError):
        from_release("0.5.18")
    assert list(cache.iterdir()) == []


@pytest.mark.wheels
def test_a_damaged_cache_is_fetched_again(cache: Path, shop: Path) -> None:
    first = from_release("0.5.18")
    kept = cache / "sglang-0.5.18.zip"
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    assert from_release("0.5.18") == first
    assert kept.read_bytes() == whole


@pytest.mark.wheels
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SWALEAK_CACHE", str(tmp_path / "file" / "cache"))
    assert from_release("0.5.18").version == "0.5.18"


@pytest.mark.wheels
def test_two_at_once_do_no_harm(cache: Path, shop: Path) -> None:
    code = "from swaleak.targets.sources import from_release; print(from_release('0.5.18').version)"
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [run.communicate()[0] for run in runs] == ["0.5.18\n"] * 3
    assert [path.name for path in cache.iterdir()] == ["sglang-0.5.18.zip"]


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("target", "strict", "code", "failing"),
    [
        ("0.5.13.post1", False, 1, {"partial-page-free"}),
        ("0.5.14", False, 0, set()),
        ("0.5.17", False, 0, set()),
        ("0.5.18", False, 1, {"tombstone-recovery"}),
        ("0.5.19", False, 0, set()),
        ("0.5.23", False, 0, set()),
        ("0.5.19", True, 1, {"nested-group", "grouped-free-adopt"}),
    ],
)
def test_the_gate(target: str, strict: bool, code: int, failing: set[str], cli: Cli) -> None:
    import json

    answer = cli("check", wheel(target), *(["--strict"] if strict else []), "-f", "json")
    results = json.loads(answer.out)["results"]
    bad = {r["scenario"] for r in results if r["verdict"] not in ("clean", "refused")}
    assert answer.code == code
    assert failing <= bad if strict else failing == bad
    assert {r["reach"] for r in results} == {"production"} | ({"latent"} if strict else set())
    assert all(r["known"] for r in results if r["scenario"] in failing)
