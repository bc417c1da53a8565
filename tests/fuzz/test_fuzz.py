"""The fuzzer: a few programs in every test run, and that it would find a fault."""

import itertools
import subprocess
import sys

import pytest

from tests.fuzz import draws, known, programs, script
from tests.fuzz.running import Runner, Verdict
from tests.fuzz.searching import Search

# Minutes: run by hand, until it is short enough for the test command.
pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def runner():
    with Runner() as runner:
        yield runner


def test_programs_of_a_fixed_seed_are_equal_to_one_device(runner):
    # Not seconds but readings of the clock, one or two for each program: the same programs on any machine.
    clock = itertools.count().__next__
    search = Search(runner.verdict, seed=3, seconds=14, strategies=("mirrored", "servers"), clock=clock)
    search.run()
    assert not search.findings, "\n".join(script.script_of(program) for program, _ in search.findings)
    assert search.counts["equal"] >= 3


def test_a_planted_fault_is_found_and_its_script_runs(runner, tmp_path):
    """Each weight of the distributed run is moved by 0.01, which shows in the simplest program of all."""
    with Runner(fault=0.01) as faulty:
        search = Search(faulty.verdict, seed=1, seconds=10.0, strategies=("mirrored",), shrink_seconds=10.0)
        search.run()
    program, verdict = search.findings[0]
    assert verdict.kind == "different" and "/weights/0" in verdict.text
    assert programs.parts_of(program) == programs.parts_of(programs.Program())
    path = tmp_path / "found.py"
    path.write_text(script.script_of(program, verdict.kind))
    printed = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=100)
    assert printed.returncode == 0, printed.stderr[-2000:]
    # Without the planted fault, of course.
    assert float(printed.stdout.split("largest difference")[1]) <= 1e-11


def _differs_with(layer):
    def verdict_of(program):
        found = layer in program.layers and program.epochs > 1
        return Verdict("different", "planted") if found else Verdict("equal")

    return verdict_of


def _counted_search(strategies):
    # A clock that counts how often it is read, so that a busy machine searches as far as an idle one.
    clock = itertools.count().__next__
    verdict_of = _differs_with("lstm")
    return Search(verdict_of, 5, seconds=600, strategies=strategies, shrink_seconds=5000, clock=clock)


def test_a_difference_is_shrunk_to_the_parts_that_matter():
    search = _counted_search(("mirrored", "servers", "workers"))
    search.run()
    smallest = search.findings[0][0]
    assert smallest.layers == ("lstm",) and smallest.epochs == 2
    assert programs.parts_of(smallest) == {("strategy", "mirrored", False), ("layers", "lstm")}


def test_a_search_goes_on_behind_a_finding_and_does_not_report_it_again():
    search = _counted_search(("mirrored",))
    search.run()
    assert len(search.findings) == 1
    assert search.counts["as before"] > 0


def test_what_is_known_is_not_drawn_or_not_reported():
    repeated = programs.Program(inputs="repeated ids", optimizer="Adam")
    assert "one row" in known.difference(repeated)
    assert known.difference(programs.Program(inputs="repeated ids")) is None
    assert known.difference(programs.Program(layers=("dropout",)))
    sequential = programs.Program(strategy="servers", layers=("dropout",))
    assert known.difference(sequential) is None
    refused = programs.Program(layers=("spectral norm",))
    assert known.refusal(refused, "assigns the trainable variable kernel")
    assert known.refusal(programs.Program(), "assigns the trainable variable kernel") is None


def test_every_piece_of_source_compiles():
    """Draws 100 programs and compiles their scripts."""
    import hypothesis

    @hypothesis.seed(1)
    @hypothesis.settings(
        max_examples=100, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(draws.programs())
    def compiles(program):
        compile(script.script_of(program), "script", "exec")

    compiles()
