"""What all commands share: help with examples that work, `--json`, and errors in one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dash_inductor import __version__, config
from dash_inductor.cli import demo
from dash_inductor.cli import main as cli
from dash_inductor.devices.cost_files import known_devices
from tests.unit.expected_text import assert_expected

ROOT = Path(__file__).parents[2]
EXAMPLES = [f"{name} {words}".strip() for name, (module, _) in cli.COMMANDS.items() for words in module.EXAMPLES]
# Those that neither compile nor need a GPU nor a file, and that take no seconds.
CHEAP = [line for line in EXAMPLES if line.split()[0] in ("choose", "compare", "env", "simulate") or line == "replay --constants"]


@pytest.fixture(autouse=True)
def default_settings(monkeypatch):
    monkeypatch.setattr(config, "_current", config.Config())
    for name in cli.EMULATING:  # else another process is started
        monkeypatch.delenv(name, raising=False)


def refused(capsys, *words: str) -> str:
    """What the command line says on its way out, in one line, with status 2."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("python -m dash_inductor").removesuffix("\n")


@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help(name, monkeypatch, capsys):
    """It fits 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main([*name.split(), "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and max(map(len, text.splitlines())) <= 80
    assert_expected(text, f"help_{name or 'of_all'}")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name):
    module, purpose = cli.COMMANDS[name]
    description, options = (
        module.__doc__,
        cli._parser().parse_args(shlex.split(f"{name} {module.EXAMPLES[0]}")).parser.format_help(),
    )
    assert len(purpose) < 75 and len(description) > 150 and len(description.split("\n\n")) >= 2
    assert "--json" in options


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_are_commands(line):
    args, unknown = cli._parser().parse_known_args(shlex.split(line))
    assert args.command == line.split()[0] and not unknown


@pytest.mark.parametrize("line", CHEAP)
def test_examples_run(line, tmp_path, monkeypatch, capsys):
    """Where they write a file it is there."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    assert cli.main(words) in ((0, 1) if words[0] == "env" else (0,))
    out = capsys.readouterr().out
    if "--json" in words:
        json.loads(out)
    if "--plot" in words:
        assert (tmp_path / words[words.index("--plot") + 1]).stat().st_size > 1000
    assert len(out.splitlines()) > 3 or "--json" in words


def test_there_are_cheap_examples():
    assert {line.split()[0] for line in CHEAP} == {"choose", "compare", "env", "replay", "simulate"}


def test_alone_it_prints_its_help(capsys):
    assert cli.main([]) == 0
    assert capsys.readouterr().out == cli._parser().format_help()


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"dash-inductor {__version__}\n")


SIZES = "--q-len 64 --kv-len 64 --batch 1 --heads 1 --head-dim 64"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chose", ": error: there is no command 'chose'; did you mean choose?"),
        ("frobnicate", f": error: there is no command 'frobnicate'; the commands are {', '.join(cli.COMMANDS)}"),
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


@pytest.mark.parametrize("line", [f"choose {SIZES}", f"codegen {SIZES}", "explain train:setup"])
def test_a_device_in_any_case(line):
    assert cli._parser().parse_args([*line.split(), "--device", "H100"]).device == "h100"


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


@pytest.mark.parametrize("line", ["qualify", "demo", f"codegen --device h100 {SIZES}", "gates"])
def test_without_torch_there_is_one_line(line, tmp_path):
    for name in ("torch", "triton"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('lib{name}.so cannot be opened')")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DASH_INDUCTOR")}
    command = [sys.executable, "-m", "dash_inductor", *line.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment | {"PYTHONPATH": f"{tmp_path}:."}, capture_output=True, text=True)
    opening = f"{demo.OPENING}\n" if line == "demo" else ""  # which comes before torch is imported
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, opening, 1), done.stderr
    assert "cannot be opened; `python -m dash_inductor env` lists what is installed" in done.stderr


def test_choose_marks_what_it_takes(capsys):
    """Candidates come by time, and one of them is the schedule above."""
    assert cli.main(["choose", "--device", "H100", *f"{SIZES} --json".split()]) == 0
    chosen = json.loads(capsys.readouterr().out)
    cli.main(["choose", "--device", "H100", *SIZES.split()])
    head, *lines = capsys.readouterr().out.partition("fastest first")[2].strip().splitlines()
    rows = [line for line in lines[1:] if line.split()][: len(chosen["candidates"])]
    times = [float(line.removesuffix("chosen").split()[-1]) for line in rows]
    assert times == sorted(times) and len(times) > 2 and head.endswith("predicted us")
    (marked,) = (line for line in rows if line.endswith("chosen"))
    assert marked.split()[0] == chosen["family"] and float(marked.split()[-2]) == chosen["predicted_us"]
