"""The benchmark of compile times: its command, and what it refuses to report."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks.times import compilation
from benchmarks.times.compilation import EMPTY, FULL, WITH, WITHOUT, compiled


def child(**found: float) -> SimpleNamespace:
    return SimpleNamespace(stdout=json.dumps({"wall": 2.0, "cpu": 1.0} | found))


@pytest.mark.parametrize("package", [WITHOUT, WITH])
@pytest.mark.parametrize("caches", [EMPTY, FULL])
def test_a_child_that_compiled_something_else_is_refused(package, caches, monkeypatch):
    expected = {"rewritten": 8 if package == WITH else 0, "from_cache": int(caches == FULL)}
    children = [child(**expected), child(**expected | {"rewritten": 7}), child(**expected | {"from_cache": int(caches == EMPTY)})]
    asked = []

    def run(command, *, env, **_):
        asked.append(env)
        return children[len(asked) - 1]

    monkeypatch.setattr(compilation.subprocess, "run", run)
    monkeypatch.setenv("DASH_INDUCTOR_SCHEDULE", "descending")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    assert compiled(8, package, caches, "/folder") == {"wall": 2.0, "cpu": 1.0}
    with pytest.raises(RuntimeError, match="other attentions were rewritten"):
        compiled(8, package, caches, "/folder")
    with pytest.raises(RuntimeError, match="out of one"):
        compiled(8, package, caches, "/folder")
    for env in asked:
        assert env["TORCH_DEVICE_BACKEND_AUTOLOAD"] == ("1" if package == WITH else "0")
        assert env["TORCHINDUCTOR_CACHE_DIR"] == "/folder" and env["TRITON_CACHE_DIR"].startswith("/folder/")
        assert not {"DASH_INDUCTOR_SCHEDULE", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"} & set(env)


def test_the_command(monkeypatch, capsys):
    """Both take turns, each with a folder of its own, empty and then full; differences are within a repetition."""
    calls = []

    def instead(layers, package, caches, folder):
        calls.append((layers, package, caches, folder))
        cpu = len(calls) + (100.0 if package == WITH else 0)
        return {"wall": 2 * cpu, "cpu": cpu}

    monkeypatch.setattr(compilation, "compiled", instead)
    compilation.main(["--layers", "4", "--repetitions", "3"])
    assert [call[1] for call in calls[::2]] == [WITHOUT, WITH, WITH, WITHOUT, WITHOUT, WITH]
    assert [call[2] for call in calls] == [EMPTY, FULL] * 6
    assert [a[3] for a in calls[::2]] == [b[3] for b in calls[1::2]]
    assert len({call[3] for call in calls}) == 6 and {call[0] for call in calls} == {4}
    said = capsys.readouterr().out
    assert "4 layers, medians of 3" in said
    (line,) = (line for line in said.splitlines() if line.split()[:2] == [EMPTY, "CPU"])
    # without: 1, 7, 9; with: 103, 105, 111; differences 102, 98, 102
    assert line.split()[3:] == ["7.00", "105.00", "+102.00"]
