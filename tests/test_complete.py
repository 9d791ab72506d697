"""Shell completion, as the shell asks for it; torch stays out."""

import os
import subprocess
import sys

import pytest

# words on the command line, the last one incomplete -> some of what is offered, what is not
LINES = {
    "scenarios": ("repro tomb", {"tombstone-recovery", "tombstone-replace"}, {"steady-group"}),
    "scenarios of show": ("show nest", {"nested-group"}, {"tombstone-recovery"}),
    "scenarios of export": ("export hica", {"hicache-load-back"}, {"nested-group"}),
    "strategies": ("repro --strategy e", {"eager", "enqueue"}, {"deferred"}),
    "targets": ("verify --on 0.5.1", {"0.5.18", "0.5.19"}, {"0.5.20", "builtin"}),
    "targets by name": ("repro --on b", {"builtin"}, {"auto"}),
    "commands": ("dia", {"diagnose"}, {"repro"}),
}


@pytest.mark.parametrize("name", LINES)
def test_completion(name):
    line, wanted, unwanted = LINES[name]
    words = ["swaleak", *line.split()]
    program = (
        "import sys\nsys.argv = ['swaleak']\nfrom swaleak.cli import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "_SWALEAK_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        },
    )
    offered = set(run.stdout.split())
    assert (run.stderr, wanted - offered, unwanted & offered) == ("", set(), set())
