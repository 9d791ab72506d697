"""A recorded command is stopped as its user would stop it, and what it wrote is reported."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Cli

# stands for a server: it records, and needs a second to shut down once it is told to
SERVER = """
import os, signal, sys, time
from swaleak.trace.format import Header, TraceWriter
from swaleak.live.plugin import read_settings
told = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: told.append(number))
TraceWriter(read_settings(os.environ["SWALEAK"]).record).start(Header(1, 8, 8))
print("ready", flush=True)
while not told:  # a signal that came just before pause() would be waited for for ever
    time.sleep(0.01)
time.sleep(1)
print("told", *map(int, told), flush=True)
if {stubborn}:
    while True:
        signal.pause()
sys.exit(7)
"""


def command(folder: Path, *, stubborn: bool = False) -> list[str]:
    (folder / "server.py").write_text(SERVER.format(stubborn=stubborn))
    server = [sys.executable, str(folder / "server.py")]
    recorded = ["record", "-o", str(folder / "t.jsonl"), "-f", "json", "--", *server]
    return [sys.executable, "-m", "swaleak", *recorded]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def launched(folder: Path, *, stubborn: bool = False) -> subprocess.Popen[str]:
    """Return a ``swaleak record`` without a terminal, its command ready."""
    process = subprocess.Popen(
        command(folder, stubborn=stubborn),
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def reported(output: str, folder: Path) -> bool:
    (trace,) = folder.glob("t.*.jsonl")
    return json.loads(output[output.index("{") :])["results"] == [{"trace": str(trace)}]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_the_command_waited_for(number: int, tmp_path: Path) -> None:
    process = launched(tmp_path)
    process.send_signal(number)
    output, _ = process.communicate()
    assert (process.returncode, output.splitlines()[0], reported(output, tmp_path)) == (
        7,
        f"told {int(number)}",
        True,
    )


def test_a_second_one_kills(tmp_path: Path) -> None:
    process = launched(tmp_path, stubborn=True)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "told 2\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert (process.returncode, reported(output, tmp_path)) == (128 + signal.SIGKILL, True)


def test_ctrl_c_in_a_terminal_is_heard_once(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        words = command(tmp_path)
        os.execve(words[0], words, ENVIRONMENT)
    output = b""
    pressed = False
    while True:
        try:
            output += os.read(terminal, 4096)
        except OSError:  # how a terminal ends
            break
        if b"ready" in output and not pressed:
            os.write(terminal, b"\x03")
            pressed = True
    _, status = os.waitpid(pid, 0)
    text = output.decode()
    assert (os.waitstatus_to_exitcode(status), "told 2\r\n" in text) == (7, True)
    assert reported(text, tmp_path)


def test_nothing_recorded_is_bad_usage_and_says_how_the_command_ended(cli: Cli) -> None:
    answer = cli("record", "-o", "t.jsonl", "--", "sh", "-c", "kill -9 $$")
    assert (answer.code, answer.out, "(exit code 137)" in answer.err) == (2, "", True)


def test_a_file_name_with_brackets_is_no_pattern(cli: Cli, tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from swaleak.live.plugin import read_settings\n"
        "from swaleak.trace.format import Header, TraceWriter\n"
        "TraceWriter(read_settings(os.environ['SWALEAK']).record).start(Header(1, 8, 8))\n"
    )
    wanted = tmp_path / "run[1].jsonl"
    answer = cli("record", "-o", wanted, "-f", "json", "--", sys.executable, "-c", code)
    [result] = json.loads(answer.out)["results"]
    name = Path(result["trace"]).name
    assert (answer.code, name.startswith("run[1]."), name.endswith(".jsonl")) == (0, True, True)
