"""How are programs tried until time is up, and differences shrunk?"""

from __future__ import annotations

import collections
import time

import hypothesis

from tests.fuzz import draws, known, programs

# Hypothesis ends a search at its first difference; the next search has another seed.
_PROGRAMS_A_SEARCH = 100


class _Differs(Exception):
    """A program differs from one device."""


class Search:
    """Tries programs and keeps the smallest of each kind that differs.

    Args:
        verdict_of: Function of a program.
        seed: Which programs are drawn.
        seconds: When to end.
        strategies: Which strategies are drawn.
        shrink_seconds: How long at most to shrink one difference.
        on_program: Called with each program and its verdict.
        clock: Returns seconds.

    Attributes:
        counts: Number of programs by kind of verdict.
        findings: The smallest programs that differ, with verdicts.
    """

    def __init__(
        self,
        verdict_of,
        seed,
        seconds,
        strategies,
        shrink_seconds=60.0,
        on_program=None,
        clock=time.monotonic,
    ):
        self._verdict_of, self._seed, self._strategies = verdict_of, seed, strategies
        self._shrink_seconds, self._on_program, self._clock = shrink_seconds, on_program, clock
        self._end = clock() + seconds
        self._verdicts = {}
        self._shrinking_until = None
        self.counts: collections.Counter[str] = collections.Counter()
        self.findings = []

    def run(self):
        """Searches until time is up."""
        number = 0
        while self._clock() < self._end:
            self._search(self._seed * 1000 + number)
            number += 1

    def _search(self, seed):
        self._shrinking_until, smallest = None, None

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=_PROGRAMS_A_SEARCH,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(hypothesis.HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @hypothesis.given(draws.programs(self._strategies))
        def attempt(program):
            nonlocal smallest
            if known.difference(program):
                hypothesis.reject()
            verdict = self._tried(program)
            if verdict.is_finding:
                smallest = program
                raise _Differs

        try:
            attempt()
        except (_Differs, hypothesis.errors.Flaky):
            smallest = self._without_what_does_not_matter(smallest)
            self.findings.append((smallest, self._verdicts[smallest]))

    def _without_what_does_not_matter(self, program):
        """Goes on where hypothesis stopped, field by field."""
        for candidate in programs.simpler(program):
            if not known.difference(candidate) and self._tried(candidate).is_finding:
                return self._without_what_does_not_matter(candidate)
        return program

    def _tried(self, program):
        from tests.fuzz.running import Verdict

        if program in self._verdicts:
            return self._verdicts[program]
        deadline = self._end if self._shrinking_until is None else self._shrinking_until
        if self._clock() >= deadline:
            return Verdict("untried")
        if self._shrinking_until is None and any(
            programs.contains(program, found) for found, _ in self.findings
        ):
            self.counts["as before"] += 1
            return Verdict("as before")
        verdict = self._verdict_of(program)
        self._verdicts[program] = verdict
        self.counts[verdict.kind] += 1
        if self._on_program is not None:
            self._on_program(program, verdict)
        if verdict.is_finding and self._shrinking_until is None:
            self._shrinking_until = self._clock() + self._shrink_seconds
        return verdict
