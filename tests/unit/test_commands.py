"""What all commands share: help with examples that work, `--json`, and errors in one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine_code.__main__ import PROGRAM as MACHINE_CODE
from benchmarks.schedules.__main__ import PROGRAM as SCHEDULES
from dash_inductor import __version__, config
from dash_inductor.cli import demo
from dash_inductor.cli.main import PROGRAM, main
from dash_inductor.cli.program import EMULATING, Program
from dash_inductor.devices.cost_files import known_devices

ROOT = Path(__file__).parents[2]
COMMANDS = [(program, name) for program in (PROGRAM, MACHINE_CODE, SCHEDULES) for name in program.commands]
EXAMPLES = [(program, f"{name} {words}".strip()) for program, name in COMMANDS for words in program.commands[name][0].EXAMPLES]
# Those that neither compile nor need a GPU nor a file, and that take no seconds.
CHEAP = [
    (program, line)
    for program, line in EXAMPLES
    if line.split()[0] in ("choose", "compare", "env", "simulate") or line == "replay --constants"
]


@pytest.fixture(autouse=True)
def default_settings(monkeypatch):
    monkeypatch.setattr(config, "_current", config.Config())
    for name in EMULATING:  # else another process is started
        monkeypatch.delenv(name, raising=False)


def refused(capsys, *words: str) -> str:
    """What the command line says on its way out, in one line, with status 2."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("python -m dash_inductor").removesuffix("\n")


@pytest.mark.parametrize(("program", "name"), [*COMMANDS, (PROGRAM, ""), (MACHINE_CODE, ""), (SCHEDULES, "")])
def test_help(program, name, monkeypatch, capsys):
    """It fits 80 columns, says what for in two paragraphs or more, and has examples."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        program.main([*name.split(), "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and max(map(len, text.splitlines())) <= 80
    assert f"examples:\n  {program.name} {name}".rstrip() in text
    if name:
        module, purpose = program.commands[name]
        assert len(purpose) < 75 and len(module.__doc__) > 150 and len(module.__doc__.split("\n\n")) >= 2
        assert "--json" in text or name == "grid"
    else:
        assert all(f"  {each} " in text for each in program.commands)


@pytest.mark.parametrize(("program", "line"), EXAMPLES)
def test_examples_are_commands(program: Program, line):
    args, unknown = program.parser().parse_known_args(shlex.split(line))
    assert args.command == line.split()[0] and not unknown


@pytest.mark.parametrize(("program", "line"), CHEAP)
def test_examples_run(program, line, tmp_path, monkeypatch, capsys):
    """Where they write a file it is there."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    assert program.main(words) in ((0, 1) if words[0] == "env" else (0,))
    out = capsys.readouterr().out
    if "--json" in words:
        json.loads(out)
    if "--plot" in words:
        assert (tmp_path / words[words.index("--plot") + 1]).stat().st_size > 1000
    assert len(out.splitlines()) > 3 or "--json" in words


def test_there_are_cheap_examples():
    assert {line.split()[0] for _, line in CHEAP} == {"choose", "compare", "env", "replay", "simulate"}


def test_alone_it_prints_its_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == PROGRAM.parser().format_help()


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"dash-inductor {__version__}\n")


SIZES = "--q-len 64 --kv-len 64 --batch 1 --heads 1 --head-dim 64"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chose", ": error: there is no command 'chose'; did you mean choose?"),
        ("frobnicate", f": error: there is no command 'frobnicate'; the commands are {', '.join(PROGRAM.commands)}"),
        ("gates", ": error: gates runs from a checkout of the repository: python -m benchmarks.machine_code gates"),
        ("compare", ": error: compare runs from a checkout of the repository: python -m benchmarks.schedules compare"),
        ("--jsn", ": error: unrecognized arguments: --jsn; python -m dash_inductor --help has examples"),
        ("env --jsn", " env: error: unrecognized arguments: --jsn; python -m dash_inductor env --help has examples"),
        (
            "choose --device h100",
            " choose: error: the following arguments are required: --q-len, --kv-len, --batch, --heads, --head-dim; "
            "python -m dash_inductor choose --help has examples",
        ),
        (
            f"choose --device gh200 {SIZES}",
            f" choose: error: argument --device: there is no cost file for 'gh200'; take one of {', '.join(known_devices())}",
        ),
        (f"choose --device h100 {SIZES} --batch 0", " choose: error: argument --batch: must be at least 1, got 0"),
    ],
)
def test_errors(words, message, capsys):
    assert refused(capsys, *words.split()) == message


def test_gates_of_no_kernel(capsys):
    """A command whose errors are mostly of our making says in one line what is the user's."""
    with pytest.raises(SystemExit, match="2"):
        MACHINE_CODE.main(["gates", "--arch", "sm_100", "--template", "one_pass", "--head-dim", "192", "--head-dim", "256"])
    reason = "one pass takes head dims up to 128, Gluon is for sm_90 and head dims 64, 128 and 256"
    line = f"python -m benchmarks.machine_code gates: error: no kernel has all that was asked for: {reason}\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("program", "line"), [(PROGRAM, f"choose {SIZES}"), (PROGRAM, "explain train:setup"), (MACHINE_CODE, f"codegen {SIZES}")]
)
def test_a_device_in_any_case(program, line):
    assert program.parser().parse_args([*line.split(), "--device", "H100"]).device == "h100"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DASH_INDUCTOR_SCHEDULE", "shft", "DASH_INDUCTOR_SCHEDULE='shft' is not one of auto, ascending, descending, shift,"),
        ("DASH_INDUCTOR_SEEED", "1", "DASH_INDUCTOR_SEEED is not a setting; the settings are DASH_INDUCTOR,"),
    ],
)
def test_a_wrong_variable(name, value, message, monkeypatch, capsys):
    monkeypatch.setattr(config, "_current", None)
    monkeypatch.setenv(name, value)
    assert refused(capsys, "choose", "--device", "h100", *SIZES.split()).startswith(f" choose: error: {message}")


@pytest.mark.parametrize(
    ("program", "line"),
    [(PROGRAM, "qualify"), (PROGRAM, "demo"), (MACHINE_CODE, f"codegen --device h100 {SIZES}"), (MACHINE_CODE, "gates")],
)
def test_without_torch_there_is_one_line(program, line, tmp_path):
    for name in ("torch", "triton"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('lib{name}.so cannot be opened')")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DASH_INDUCTOR")}
    command = [sys.executable, "-m", program.module, *line.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment | {"PYTHONPATH": f"{tmp_path}:."}, capture_output=True, text=True)
    opening = f"{demo.OPENING}\n" if line == "demo" else ""  # which comes before torch is imported
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, opening, 1), done.stderr
    assert "cannot be opened; `python -m dash_inductor env` lists what is installed" in done.stderr


def test_choose_marks_what_it_takes(capsys):
    """Candidates come by time, and one of them is the schedule above."""
    assert main(["choose", "--device", "H100", *f"{SIZES} --json".split()]) == 0
    chosen = json.loads(capsys.readouterr().out)
    main(["choose", "--device", "H100", *SIZES.split()])
    head, *lines = capsys.readouterr().out.partition("fastest first")[2].strip().splitlines()
    rows = [line for line in lines[1:] if line.split()][: len(chosen["candidates"])]
    times = [float(line.removesuffix("chosen").split()[-1]) for line in rows]
    assert times == sorted(times) and len(times) > 2 and head.endswith("predicted us")
    (marked,) = (line for line in rows if line.endswith("chosen"))
    assert marked.split()[0] == chosen["family"] and float(marked.split()[-2]) == chosen["predicted_us"]
