"""The command of tests/soak at a few steps: it trains through faults, and sees runs that part."""

from __future__ import annotations

import pytest

from tests.soak import __main__ as command
from tests.soak import verdicts
from tests.soak.__main__ import INTERLEAVING, KILLED, KINDS, OTHER_SMS, SMS, Device, Fault, Run, draw_faults, main, parting, soak

STEPS = 60  # of the shortened one
IDENTICAL = "bitwise: weights and optimizer are identical after each of"


@pytest.mark.nightly
def test_the_same_bits_after_a_killed_rank(tmp_path, capfd):
    """It dies in the fourth step; both go on from the second, in another interleaving."""
    status = soak(tmp_path, 4, 2, "device", [Fault(KILLED, 4, Device(seed=2), rank=1)])
    printed = capfd.readouterr()
    assert status == 0 and f"{IDENTICAL} 4 steps" in printed.out and "rank 1 killed" in printed.out, f"{printed.out}\n{printed.err}"
    for rank in range(2):
        steps = [int(line.split()[0]) for line in (tmp_path / "with_faults" / f"digests{rank}").read_text().splitlines()]
        assert steps == [1, 2, 3, 3, 4]


@pytest.mark.nightly
def test_a_shortened_soak(tmp_path, monkeypatch, capfd, record_property):
    """Every kind of fault twice."""
    monkeypatch.setattr(command, "FOLDER", tmp_path / "soak")
    faults = 2 * len(KINDS)
    status = main([f"--steps={STEPS}", f"--faults={faults}"])
    printed = capfd.readouterr()  # it begins with the seed of the faults
    assert status == 0 and f"{IDENTICAL} {STEPS} steps" in printed.out, f"{printed.out}\n{printed.err}"
    record_property("steps of each training", STEPS)
    record_property("faults", faults)


@pytest.mark.nightly
def test_it_sees_another_schedule(tmp_path, capfd):
    """At level `run` the bits depend on the number of SMs: the runs part in the step after the fault."""
    status = soak(tmp_path, 4, 2, "run", [Fault(OTHER_SMS, 3, Device(sms=8))])
    printed = capfd.readouterr()
    assert status == 1 and "bitwise: the runs part in step 4" in printed.out, f"{printed.out}\n{printed.err}"


def test_where_runs_part():
    first = Run({1: {"a"}, 2: {"b"}, 3: {"c"}}, [], 0.0)
    assert parting(first, first) is None
    for digests in ({"d"}, {"b", "d"}):  # another run's; of one rank, or of a step taken again
        assert parting(first, Run(first.digests | {2: digests}, [], 0.0)) == 2
        assert parting(Run(first.digests | {2: digests}, [], 0.0), first) == 2


def test_every_kind_of_fault_is_drawn():
    for seed in range(100):
        faults = draw_faults(seed, 12, 10)
        assert [fault.step for fault in faults] == list(range(2, 12))
        assert sorted(fault.kind for fault in faults) == sorted(2 * KINDS)
        device = Device()
        for fault in faults:
            changed = fault.device.seed != device.seed, fault.device.sms != device.sms
            assert changed == (fault.kind == INTERLEAVING, fault.kind == OTHER_SMS)
            assert fault.device.sms in SMS
            device = fault.device
    assert len({tuple(draw_faults(seed, 500, 10)) for seed in range(10)}) == 10


def test_as_many_faults_as_steps(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "5", "--faults", "4"])
    assert "4 faults need 6 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "killed", "problem"),
    [((0, 1), None, "rank 1 ended with status 1"), ((0, -9), 1, "rank 0 ended with status 0"), ((1, 1), 1, "rank 1 ended")],
)
def test_a_process_that_ends_as_it_should_not(statuses, killed, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "ranks", lambda *_: [(status, "its output", 0.0) for status in statuses])
    with pytest.raises(command.BrokenRun, match=f"{problem}(.|\n)*its output"):
        command.start(tmp_path, [], killed, 1.0)


def test_a_process_that_hangs(tmp_path, monkeypatch, capsys):
    """It is ended, and what it printed is told."""
    (tmp_path / "hangs.py").write_text("import time; print('step 1', flush=True); time.sleep(600)")
    monkeypatch.setattr(command, "TRAIN", str(tmp_path / "hangs.py"))
    monkeypatch.setattr(command, "SECONDS_TO_START", 1)
    monkeypatch.setattr(command, "SECONDS_A_STEP", 0)
    assert soak(tmp_path / "soak", 5, 2, "device", []) == 1
    assert "soak: no end after 1 s: ranks [0, 1] hang\nstep 1" in capsys.readouterr().err


@pytest.mark.nightly
def test_ranks_whose_trials_say_something_else():
    """Both ends come about in these starts, whichever rank tries first: equal bits, and an error before a backward."""
    assert verdicts.main(["--steps", "40", "--seed", "8"]) == 0
