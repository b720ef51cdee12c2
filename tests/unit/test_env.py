"""`python -m dash_inductor env`: what it reports, what it finds wrong, and what it must not tell."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor_config

from dash_inductor import config, templates
from dash_inductor.cli import env, env_torch
from dash_inductor.cli.main import main
from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.rewrite.declined import REFUSED
from tests.unit.expected_text import assert_expected

ROOT = Path(__file__).parents[2]
OURS = ("DASH", "TORCH", "TRITON", "CUBLAS", "NVIDIA", "NCCL", "CUDA", "PYTHONHASHSEED")


@pytest.fixture(autouse=True)
def default_settings(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "_current", config.Config())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for name in os.environ:
        if name.startswith("DASH"):
            monkeypatch.delenv(name)


def process(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """The command in a process whose home is `folder`, in which modules may stand that hide others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    environment |= {"HOME": str(folder), "PYTHONPATH": f"{folder}:.", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")} | variables
    command = [sys.executable, "-m", "dash_inductor", "env", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def without_versions(text: str) -> str:
    """The report without versions and without packages that need not be there."""
    head, _, rest = text.partition("\nGPUs")
    names = [line.split("  ")[1] for line in head.splitlines()[1:] if not line.startswith("   ")]
    return "\n".join(["Versions", *(f"  {name}" for name in names if name not in env.PACKAGES), f"GPUs{rest}"])


def reported() -> env.Report:
    return env.collect(dict(os.environ))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the text is of a machine without a GPU")
def test_the_text(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernel.py").write_bytes(bytes(3 << 20))
    done = process(tmp_path)
    assert (done.returncode, done.stderr) == (int(not torch.cuda.is_available()), "")  # without a GPU nothing is rewritten
    assert_expected(without_versions(done.stdout), "env")


def test_what_is_wrong_is_named_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setattr(config, "_current", None)
    variables = {"DASH_INDUCTOR_SEEED": "1", "DASH_INDUCTOR_LAUNCH": "gruoped", "DASHINDUCTOR_SMS": "9", "DASH_INDUCTOR_XYZ": ""}
    for name, value in {**variables, "DASH_INDUCTOR_GUARANTEE": "batch"}.items():
        monkeypatch.setenv(name, value)
    assert main(["env"]) == 1
    text = capsys.readouterr().out
    assert "  guarantee       batch (DASH_INDUCTOR_GUARANTEE)\n" in text and "raises at every compilation" in text
    assert_expected(text[text.index("Problems") :], "env_problems")


def test_this_pair_is_told(monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.99.0")
    assert env_torch.versions()["torch and triton"].startswith("untested pair: take torch 2.11 with 3.6.0, ")


def test_pairs_are_those_of_the_page():
    rows = re.findall(r"^\| (2\.\d+) \| (\S+) \|$", (ROOT / "docs" / "start.md").read_text(), re.MULTILINE)
    assert dict(rows) == env_torch.PAIRS


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_without_torch_the_rest_is_there(json_too, tmp_path):
    for name in ("torch", "triton"):
        (tmp_path / f"{name}.py").write_text("raise OSError('libcudart.so.13:\\n cannot open shared object file')")
    done = process(tmp_path, *json_too)
    assert (done.returncode, done.stderr) == (1, "")
    problem = (
        "torch cannot be imported (OSError: libcudart.so.13: cannot open shared object file): install it anew (pip install torch)"
    )
    if json_too:
        report = json.loads(done.stdout)
        assert report["problems"][0].startswith(problem) and torch.__version__.startswith(report["versions"]["torch"])
        assert report["settings"]["schedule"] == {"value": "auto", "from": "default"}
    else:
        assert problem in " ".join(done.stdout.split())
        assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == [
            *("Versions", "GPUs: none", "Settings", "Environment", "Ways in", "Caches", "Problems")
        ]


def test_nothing_tells_who_and_where(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_ada")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "ada" / "triton"))
    for arguments in (["env"], ["env", "--json"]):
        main(arguments)
        out = capsys.readouterr().out
        assert "/tmp/torchinductor_<user>" in out and "~/triton" in out
        assert not re.search(r"\bada\b|_ada\b", out) and str(tmp_path) not in out
        assert len(platform.node()) < 4 or platform.node() not in out
    assert env.shortened([{"uuid": "GPU-1", "a": f"{tmp_path}/ada, {tmp_path}/adaptive"}]) == [{"a": f"~, {tmp_path}/adaptive"}]


def test_json_has_what_the_text_has(capsys):
    status = main(["env"])
    titles = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert main(["env", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    named = {title.lower().replace(" ", "_") for title in titles if not title.startswith("GPU ")} | {"gpus"}
    assert set(report) == named
    assert isinstance(report["problems"], list) and (status == 1) == bool(report["problems"])
    assert set(report["caches"]["inductor"]) == {"folder", "files", "bytes"}


@pytest.mark.parametrize(
    ("environ", "name", "figure", "problems"),
    [
        ({}, "schedule", ("auto", "default"), []),
        ({"DASH_INDUCTOR": "0"}, "enabled", (False, "DASH_INDUCTOR"), []),
        ({"DASH_INDUCTOR_SCHEDULE": "shift"}, "schedule", ("shift", "DASH_INDUCTOR_SCHEDULE"), []),
        (
            {"DASH_INDUCTOR_SMS": "0"},
            "sms",
            (6, "default"),
            ["DASH_INDUCTOR_SMS=0 is not from 1 to 1024: change it, or unset it"],
        ),
        (
            {"DASH_INDUCTOR_LAUNCH": "chained", "DASH_INDUCTOR_SM_RESERVE": "2"},
            "launch",
            ("grouped", "default"),
            [
                "DASH_INDUCTOR_LAUNCH='chained' takes whatever SMs are free: DASH_INDUCTOR_SM_RESERVE=2 would not be kept: "
                "change one of them"
            ],
        ),
        ({"DASH_INDUCTR_SEED": "2"}, "seed", (0, "default"), ["DASH_INDUCTR_SEED is not read: did you mean DASH_INDUCTOR_SEED?"]),
        ({"DASH_DEBUG": "1", "DASHBOARD": "2"}, "seed", (0, "default"), []),  # of other packages
    ],
)
def test_settings_say_where_they_come_from(environ, name, figure, problems, monkeypatch):
    monkeypatch.setattr(config, "_current", None)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    found: list[str] = []
    assert tuple(env.settings(found, environ)[name].values()) == figure
    assert found == problems


def test_what_configure_changed():
    config._current = config.Config(guarantee="batch")
    assert env.settings([], {})["guarantee"] == {"value": "batch", "from": "configure()"}


def test_what_torch_asks_for():
    """Where torch has that setting; torch 2.11 has not."""
    has_it = hasattr(inductor_config, "batch_invariant")
    said = {"value": "batch", "from": "torch._inductor.config.batch_invariant"} if has_it else {"value": "run", "from": "default"}
    with inductor_config.patch(batch_invariant=True) if has_it else nullcontext():
        assert env.settings([], {})["guarantee"] == said


def test_settings_of_inductor_that_are_refused():
    """Each of them is a problem."""
    for name, value in {**dict.fromkeys(REFUSED, True), **dict.fromkeys(env_torch.SETTINGS, False)}.items():
        with inductor_config.patch(name, value):
            report = reported()
        assert report.sections["Settings of Inductor"][name] is value
        state = "on" if value else "off"
        wanted = f"torch._inductor.config.{name} is {state}, so that attention keeps its stock kernel: give it its default again"
        assert wanted in report.problems, report.problems


@pytest.mark.parametrize(
    ("settings", "variable", "problem"),
    [
        ({"enabled": False}, None, "DASH_INDUCTOR=0 switches everything off"),
        ({}, "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps the package off"),
    ],
)
def test_a_package_that_is_off(settings, variable, problem, monkeypatch):
    monkeypatch.setattr(config, "_current", config.Config(**settings))
    if variable:
        monkeypatch.setenv(variable, "0")
    assert [text for text in reported().problems if text.startswith(problem)]


def test_without_its_entry_points(monkeypatch):
    monkeypatch.setattr(env.metadata, "entry_points", lambda group: [])
    report = reported()
    assert set(report.sections["Ways in"].values()) == {"not found"}
    assert sum(problem.startswith("no entry point") for problem in report.problems) == 2


def test_a_section_that_fails_says_so(monkeypatch):
    monkeypatch.setattr(env_torch, "modes", lambda: 1 / 0)
    monkeypatch.setattr(env, "caches", lambda environ: Path("/nowhere").read_text())
    sections = reported().sections
    assert sections["Modes of torch"] == {"not available": "ZeroDivisionError: division by zero"}
    assert "not available" in sections["Caches"] and "schedule" in sections["Settings"]


UUID = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A pretended H100 that torch and nvidia-smi see, and a second GPU that nvidia-smi alone sees; its properties for torch."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    seen = f"GPU-{UUID}, NVIDIA H100, 580.1, Disabled, Enabled, 345, [N/A], 1980"
    unseen = "GPU-9, NVIDIA T4, 580.1, [N/A], Enabled, 300, 585, 1590"
    smi.write_text(f"#!/bin/sh\ncat <<END\n{seen}\n{unseen}\nEND\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with fake_gpu("h100"):
        properties: SimpleNamespace = torch.cuda.get_device_properties(0)
        properties.uuid = UUID
        yield properties


def test_gpus(gpu, capsys):
    main(["env", "--json"])
    first, second = json.loads(capsys.readouterr().out)["gpus"]
    assert first == {
        "name": "NVIDIA H100 80GB HBM3",
        "capability": "9.0",
        "SMs": 132,
        "memory_gib": 80.0,
        "driver": "580.1",
        "mig_mode": "Disabled",
        "persistence_mode": "Enabled",
        "sm_clock_mhz": "345",
        "highest_sm_clock_mhz": "1980",
        "sms_for_our_kernels": 132,
        "cost_file": "h100.toml",
        "costs": "estimates",
        "tiles_of": "sm_90",
        "tile_at_head_dim_128": "64x128x128",
        "gluon_kernel": "taken",
    } | {"name": "NVIDIA H100"}
    assert second["name"] == "NVIDIA T4" and second["torch"].startswith("does not see it")
    main(["env"])
    text = capsys.readouterr().out
    assert "GPU 0\n" in text and "GPU 1\n" in text and UUID not in text and "GPU-9" not in text


@pytest.mark.parametrize(
    ("name", "arch", "cost_file", "problem"),
    [
        ("NVIDIA GH200 480GB", (9, 0), "h100.toml, that of another GPU, with this one's SMs", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", (8, 0), "a100.toml, that of another GPU, with this one's SMs", None),
        ("NVIDIA GeForce RTX 5090", (12, 0), "rtx5090.toml", None),
        ("NVIDIA L4", (8, 9), "rtx4090.toml, that of another GPU, with this one's SMs", None),
        ("Tesla T4", (7, 5), None, "no cost file for Tesla T4, and no tile for sm_75"),
    ],
)
def test_gpus_without_a_cost_file(name, arch, cost_file, problem, gpu):
    gpu.name, (gpu.major, gpu.minor) = name, arch
    report = reported()
    assert report.gpus[0].get("cost file") == cost_file
    assert bool(problem) == any(problem and problem in text for text in report.problems)
    if problem:
        assert problem in report.gpus[0]["kernels"] and "keeps its stock kernel there" in report.problems[0]


@pytest.mark.parametrize(
    ("version", "said"), [("3.9.1", "taken"), ("3.10.0", "not taken: Triton 3.10.0 is outside of 3.6 to 3.9, with")]
)
def test_a_triton_that_the_gluon_kernel_was_not_tested_with(monkeypatch, gpu, version, said):
    """On a Hopper; no other GPU has a row of it."""
    monkeypatch.setattr("triton.__version__", version)
    templates.gluon_is_tested.cache_clear()
    try:
        for (gpu.major, gpu.minor), has_row in (((9, 0), True), ((8, 0), False)):
            row = reported().gpus[0].get("Gluon kernel")
            assert row.startswith(said) if has_row else row is None
    finally:
        templates.gluon_is_tested.cache_clear()


def test_the_emulated_device(monkeypatch):
    monkeypatch.setattr(config, "_current", config.Config(emulate=True, sms=5))
    report = reported()
    assert report.gpus[-1]["name"] == "emulated on the CPU"
    assert (report.gpus[-1]["SMs for our kernels"], report.gpus[-1]["cost file"]) == (5, "emulated.toml")
