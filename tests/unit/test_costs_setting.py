"""A cost file that the user names takes the place of the package's own; one that is damaged or of another GPU is refused."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from test_cache_keys import compiled

import dash_inductor
from dash_inductor import config
from dash_inductor.cli.main import main
from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.config import GLUON, TRITON
from dash_inductor.devices import DEVICES
from dash_inductor.devices.cost_files import (
    COSTS_REMEDY,
    FOLDER,
    OPTIONAL,
    CostFileError,
    digest_of,
    has_estimates,
    load_costs,
    load_tflops,
    require_of,
)
from dash_inductor.devices.target import Target, target_of
from dash_inductor.hooks import cache_key, ranks

GPU = "NVIDIA H100 80GB HBM3"
SHIPPED = (FOLDER / "h100.toml").read_text()
MINE = SHIPPED.replace("\nlaunch_ns = { value = ", "\nlaunch_ns = { value = 9")
CPU = torch.device("cpu")
Writer = Callable[..., str]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """Writes a file, and returns its path: another one each time, since a process reads a path once."""
    monkeypatch.setattr(config, "_current", config.Config())

    def write(text: str = MINE) -> str:
        path = tmp_path / f"costs{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(text)
        return str(path)

    return write


def choose(*words: str, device: str = "h100") -> int:
    sizes = "--mask full --q-len 8192 --kv-len 8192 --batch 1 --heads 16 --head-dim 128"
    return main(["choose", "--device", device, *sizes.split(), *words])


def test_it_takes_the_place_of_the_package_s_own(written: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    mine, now = written(), load_costs("h100", block_m=64, block_n=128, head_dim=128)
    own = load_costs(mine, block_m=64, block_n=128, head_dim=128)
    more_ns = own.launches.main_ns - now.launches.main_ns
    assert more_ns == 90_000 and own.step_ns == now.step_ns and has_estimates(mine)
    assert choose("--json") == 0
    predicted_us = json.loads(capsys.readouterr().out)["predicted_us"]
    config.configure(costs=mine)
    with fake_gpu("h100"):
        assert target_of(torch.device("cuda"), config.current()) == Target(mine, 90, 132)
    assert choose("--json") == 0
    assert json.loads(capsys.readouterr().out)["predicted_us"] == pytest.approx(predicted_us + more_ns / 1000)


@pytest.mark.parametrize("device", ["h200", "b200", "emulated"])
def test_it_is_of_one_gpu(device: str, written: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    path = written()
    config.configure(costs=path)
    with pytest.raises(SystemExit) as stopped:
        choose(device=device)
    known = f"{DEVICES[device].name} (sm_{DEVICES[device].arch})" if device in DEVICES else "emulated (emulated)"
    said = f"cost file {path} is of {GPU} (sm_90), and this device is {known}"
    assert (stopped.value.code, capsys.readouterr().err) == (2, f"python -m dash_inductor choose: error: {said}\n")
    if device in DEVICES:
        with fake_gpu(device), pytest.raises(CostFileError) as error:
            target_of(torch.device("cuda"), config.current())
        assert str(error.value) == said


def test_a_file_of_before_masks_had_a_price_is_still_read(written: Writer) -> None:
    """Then a mask costs nothing, the smaller tile as much as the other, and head dim 32 what 64 does."""
    later = ("tflops.32", *OPTIONAL)
    old = "".join(line for line in MINE.splitlines(keepends=True) if not line.startswith(later))
    path = require_of(written(old), GPU, 90)
    assert len(old.splitlines()) == len(MINE.splitlines()) - 8
    for kernel, head_dim in ((TRITON, 64), (TRITON, 128), (GLUON, 128)):
        full, *others = (
            load_tflops(path, head_dim, kernel, mask=mask, small=small)
            for mask, small in (("full", False), ("causal", False), ("block_mask", True))
        )
        assert others == [full, full] and full == load_tflops("h100", head_dim, kernel)
    assert load_tflops(path, 32) == load_tflops(path, 64) != load_tflops("h100", 32)


DAMAGED = {
    "nothing": ("", "it does not say gpu"),
    "no GPU": (MINE.replace("gpu = ", "# "), "it does not say gpu"),
    "whether": (MINE.replace("stands_in = true", "stands_in = 1"), "stands_in = 1 is neither true nor false"),
    "arch": (MINE.replace('"sm_90"', '"emulated"'), "arch = 'emulated' is not one such as 'sm_90'"),
    "cut": (MINE[: MINE.index("launch_ns")], "launch_ns has not a value, an estimate and a source"),
    "text": (MINE.replace("value = 132", 'value = "132"'), "sms = '132' is not a whole number from 1 to 1024"),
    "bool": (MINE.replace("value = 132", "value = true"), "sms = True is not a whole number from 1 to 1024"),
    "zero": (MINE.replace("value = 132", "value = 0"), "sms = 0 is not a whole number from 1 to 1024"),
    "head dim": (MINE.replace("\ntflops.64", "\ntflops.48"), "tflops.48 is no cost constant"),
    "estimate": (MINE.replace("estimate = false", "estimate = 0", 1), "estimate = 0 of memory_gib is neither true nor false"),
    "Gluon": (MINE.replace("gluon_hop_ns.256", "gluon_hop_ns.512"), "gluon_hop_ns.512 is no cost constant"),
    "Gluon elsewhere": (MINE.replace('"sm_90"', '"sm_100"'), "gluon_chain_ns is no cost constant"),
    "unknown": (f"{MINE}hops = 3\n", "hops is no cost constant"),
    "more": (MINE.replace("value = 132,", "value = 132, unit = 1,"), "sms has not a value, an estimate and a source"),
    "source": (re.sub(r'source = "[^"]*"', "source = 1", MINE, count=1), "source = 1 of memory_gib is no text"),
    "digits": (MINE.replace('"sm_90"', f'"sm_{"9" * 99}"'), f"arch = 'sm_{'9' * 36} is not one such as 'sm_90'"),
    "brackets": ("a =\n" + "[\n" * 30_000, "it opens more than 100 brackets"),
    "tables": (f"a = {'{a=' * 600}", "it opens more than 100 brackets"),
    "a long line": (f"{'a.' * 30_000}a = 1", "a line has more than 2000 bytes"),
    "a long file": (MINE + "# and so on\n" * 6000, "it has more than 65536 bytes"),
}


@pytest.mark.parametrize(("text", "said"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_named_with_the_path(text: str, said: str, written: Writer) -> None:
    path = written(text)
    for _ in range(2):
        with pytest.raises(CostFileError) as error:
            require_of(path, GPU, 90)
        assert str(error.value) == f"cost file {path} is damaged: {said}"


NUMBERS = [line.partition(" = {")[0] for line in MINE.splitlines() if " = { value = " in line]


def with_value(name: str, value: int) -> str:
    return re.sub(rf"^{re.escape(name)} = {{ value = \d+", f"{name} = {{ value = {value}", MINE, flags=re.MULTILINE)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_least_and_a_most(name: str, written: Writer) -> None:
    """Beyond them it is refused; at them a schedule is priced, in 64 bits."""
    with pytest.raises(CostFileError) as error:
        digest_of(written(with_value(name, 10**18)))
    bounds = re.fullmatch(rf".*: {re.escape(name)} = \d+ is not a whole number from (\d+) to (\d+)", str(error.value))
    assert bounds, error.value
    least, most = map(int, bounds.groups())
    for refused in (least - 1, most + 1):
        with pytest.raises(CostFileError, match=f"from {least} to {most}"):
            digest_of(written(with_value(name, refused)))
    for value in (least, most):
        path = written(with_value(name, value))
        for head_dim, kernel in ((32, TRITON), (64, TRITON), (128, TRITON), (128, GLUON), (256, GLUON)):
            costs = load_costs(path, block_m=64, block_n=128, head_dim=head_dim, kernel=kernel, mask="causal", small=True)
            assert 2**20 * max(costs.step_ns, costs.hop_ns, costs.chain_ns, costs.launches.main_ns) < 2**63


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What takes more than 20 of them ends in a TimeoutError."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file(kind: str, tmp_path: Path, seconds: None) -> None:
    """It is not waited for, and not read without end."""
    path = tmp_path / "costs.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    said = "cannot be read: Is a directory" if kind == "folder" else "is damaged: it is not a regular file"
    with pytest.raises(CostFileError) as error:
        digest_of(str(path))
    assert str(error.value) == f"cost file {path} {said}"


def test_what_is_no_toml_and_what_is_not_there(written: Writer, tmp_path: Path) -> None:
    path = written("tflops = ")
    with pytest.raises(CostFileError, match=f"cost file {path} is damaged: Invalid value"):
        digest_of(path)
    for name, said in (("none.toml", "cannot be read: No such file or directory"), ("\0.toml", "is damaged: embedded null byte")):
        with pytest.raises(CostFileError, match=said):
            digest_of(str(tmp_path / name))


def test_its_bytes_are_in_the_keys_of_caches(written: Writer) -> None:
    """Where it lies is not: the same bytes are the same key. Ranks compare them as well."""
    keys, facts = [], []
    for text in (None, MINE, MINE, f"{MINE}#"):
        config.configure(costs=written(text) if text else "")
        keys.append(cache_key.settings_key())
        facts.append(ranks.facts(CPU))
    assert keys[1] == keys[2] and len(set(keys)) == 3
    assert facts[1] == facts[2] and len({each["cost file"] for each in facts}) == 3
    assert facts[0]["cost file"] == "the package's"


def test_a_process_reads_it_once(written: Writer) -> None:
    """What decides and what stands in keys are of the same bytes, though the file be written anew."""
    path = written()
    config.configure(costs=path)
    before = cache_key.settings_key(), load_costs(path, block_m=64, block_n=128, head_dim=64)
    Path(path).write_text(MINE.replace("value = 9", "value = 1"))
    assert (cache_key.settings_key(), load_costs(path, block_m=64, block_n=128, head_dim=64)) == before


def test_each_compilation_raises_damage(switched_off: None, written: Writer) -> None:
    path = written("")
    with dash_inductor.enabled(costs=path), pytest.raises(Exception, match=f"cost file {path} is damaged: it does not say gpu"):
        compiled()
    with dash_inductor.enabled(costs=written()):
        assert compiled() == (0, 2)


def test_env_lists_it_among_the_problems(written: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    path = written("")
    config.configure(costs=path)
    main(["env", "--json"])
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [p for p in problems if "cost file" in p] == [f"cost file {path} is damaged: it does not say gpu: {COSTS_REMEDY}"]


def test_name_and_architecture_count(written: Writer) -> None:
    path = written()
    assert require_of(path, GPU, 90) == path
    for gpu, arch in ((GPU, 100), ("NVIDIA H100 PCIe", 90)):
        with pytest.raises(CostFileError, match="and this device is"):
            require_of(path, gpu, arch)
