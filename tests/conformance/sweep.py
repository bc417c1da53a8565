"""Runs programs at places in worker processes, two at a time, and judges what was seen."""

import concurrent.futures
import dataclasses
import tempfile
import time

from tests.conformance import judge
from tests.conformance.catalogue import FAMILIES, catalogue
from tests.conformance.known_differences import known
from tests.conformance.places import DISTRIBUTED, PLACES
from tests.conformance.programs import PROGRAMS
from tests.conformance.runs import run_items
from tfdist_ext.testing import WorkerPool

TIMEOUT_SECONDS = 400


@dataclasses.dataclass(frozen=True)
class Job:
    """Items of a program that are run together at a place."""

    program: str
    place: str
    items: tuple[str, ...]


def jobs_of(place, programs=PROGRAMS, only=None):
    """Returns the jobs of a place: many items together, and each for itself that is known to be refused."""
    jobs = []
    for name, program in programs.items():
        items = [item for item in program.items if not only or item in only]
        apart = [item for item in items if _is_refused(place, program.family, item)]
        together = [item for item in items if item not in apart]
        size = program.items_a_group
        groups = [together[start : start + size] for start in range(0, len(together), size)]
        jobs += [Job(name, place, tuple(group)) for group in [*groups, *([item] for item in apart)]]
    return jobs


def _is_refused(place, family, item):
    entry = known(place, family, item)
    return entry is not None and entry.kind == "refused"


def run_job(pool, job, log=lambda text: None):
    """Returns, for each process of the place, item -> what was seen."""
    place, start = PLACES[job.place], time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = pool.run(
                run_items,
                num_workers=place.num_workers,
                devices=place.devices,
                timeout_seconds=TIMEOUT_SECONDS,
                place=job.place,
                program=job.program,
                items=list(job.items),
                folder=folder,
            )
    except Exception as error:
        failure = {"error": type(error).__name__, "message": str(error)[:3000], "ours": False}
        results = [{item: failure for item in job.items}]
    log(f"{time.monotonic() - start:6.1f} s  {job.place}: {job.program}, {len(job.items)} items")
    return results


def run_all(places=DISTRIBUTED, programs=PROGRAMS, only=None, log=lambda text: None, threads=2):
    """Returns (program, item) -> place -> what each process saw; one device is run once for all."""
    jobs = [job for place in ("one device", *places) for job in jobs_of(place, programs, only)]
    seen = {}
    with WorkerPool() as pool, concurrent.futures.ThreadPoolExecutor(threads) as executor:
        for job, results in zip(jobs, executor.map(lambda job: run_job(pool, job, log), jobs), strict=True):
            for item in job.items:
                found = [result[item] for result in results if item in result]
                seen.setdefault((job.program, item), {})[job.place] = found
                if job.place in places:
                    _say_what_is_wrong(seen, job, item, programs, log)
    return seen


def _say_what_is_wrong(seen, job, item, programs, log):
    verdict = _verdict(
        seen, job.place, programs[job.program].family, item, {job.program: programs[job.program]}
    )
    if verdict.status in ("unjudged", "wrong"):
        log(f"{PLACES[job.place].title}: {job.program}: {item} is {verdict.status}: {verdict.text[:500]}")


def verdicts_of(seen, places=DISTRIBUTED, programs=PROGRAMS):
    """Returns place -> family -> name -> verdict, for all names of the catalogue and of the programs."""
    names = {family: list(found) for family, found in catalogue().items()}
    for program in programs.values():
        names.setdefault(program.family, [])
        names[program.family] += [item for item in program.items if item not in names[program.family]]
    return {
        place: {
            family: {name: _verdict(seen, place, family, name, programs) for name in found}
            for family, found in names.items()
        }
        for place in places
    }


def _verdict(seen, place, family, name, programs):
    """Returns the worst verdict of all programs and processes in which a name stands."""
    found = []
    for key, program in programs.items():
        if program.family != family or name not in program.items:
            continue
        views = seen.get((key, name), {})
        (expected,) = views.get("one device", [None])[:1]
        for actual in views.get(place, [None]):
            found.append(_verdict_of_one(place, program, name, expected, actual, views))
    found = found or [judge.verdict(place, family, name, None, None)]
    return max(found, key=lambda verdict: ORDER.index(verdict.status))


def _verdict_of_one(place, program, name, expected, actual, views):
    precision = getattr(program, "precision", lambda name: "double")(name)
    found = judge.verdict(place, program.family, name, expected, actual, precision)
    # The replicas of two workers and those of two devices are as many: they differ from one device alike.
    if place == "workers" and found.status == "differs" and "mirrored 2" in views:
        found = judge.same_elsewhere(found, views["mirrored 2"][0], actual, precision)
    if found.status == "differs" and getattr(program, "statistical", False):
        found = judge.alike_in_distribution(found, expected, actual)
    return found


ORDER = ("equal", "not run", "differs", "refused", "unjudged", "wrong")


def counts_of(verdicts):
    """Returns status -> number of names, in one place."""
    counts = dict.fromkeys(ORDER, 0)
    for family in verdicts.values():
        for verdict in family.values():
            counts[verdict.status] += 1
    return counts


def faults_of(verdicts):
    """Returns a line for each name that nobody judged or that is wrong."""
    return [
        f"{PLACES[place].title}: {family}: {name} is {verdict.status}: {verdict.text}"
        for place, families in verdicts.items()
        for family, names in families.items()
        for name, verdict in names.items()
        if verdict.status in ("unjudged", "wrong")
    ]


__all__ = ["FAMILIES", "Job", "counts_of", "faults_of", "jobs_of", "run_all", "run_job", "verdicts_of"]
