"""The `gates` command where it compiles nothing."""

import pytest

from benchmarks.machine_code.__main__ import main


def test_a_selection_without_a_kernel(capsys, monkeypatch):
    """One line and no traceback, the exit code that of other arguments that make no sense."""
    for name in ("TRITON_INTERPRET", "DASH_INDUCTOR_EMULATE"):  # else another process is started
        monkeypatch.delenv(name, raising=False)
    chosen = ["--arch", "sm_100", "--template", "one_pass", "--head-dim", "192", "--head-dim", "256"]
    with pytest.raises(SystemExit) as stopped:
        main(["gates", *chosen])
    assert stopped.value.code == 2
    reason = "one pass takes head dims up to 128, Gluon is for sm_90 and head dims 64, 128 and 256"
    line = f"python -m benchmarks.machine_code gates: error: no kernel has all that was asked for: {reason}\n"
    assert capsys.readouterr() == ("", line)
