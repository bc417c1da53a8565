"""The job that is killed ends with the bits of the one that is not, and has seen each row as often."""

import concurrent.futures

from examples.crash_and_resume import compare


def test_killed_and_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(compare.__file__.rsplit("/examples/", 1)[0])
    # Neither knows of the other, and a worker that starts keeps one core busy.
    with concurrent.futures.ThreadPoolExecutor() as threads:
        jobs = [
            threads.submit(compare.results, 1, str(tmp_path / name), kills)
            for name, kills in [("whole", None), ("killed", "70")]
        ]
        (whole,), (killed,) = (job.result() for job in jobs)
    assert killed == whole
    # Three epochs, each of which has all rows.
    assert "after 135 steps" in whole and "each row seen 3 times" in whole
