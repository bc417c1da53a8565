"""Who moves training on parameter servers forward?

Workers' threads compute sets and report them; the thread that calls `next_step` applies them. What is computed,
admitted, dropped and applied is decided by the ledger alone, which is asked under one lock.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import tensorflow as tf

from tfdist_ext import compat, errors, events
from tfdist_ext.ps import Apply
from tfdist_ext.training.gradient_set import FIRST_PS
from tfdist_ext.training.half_set import tell_each_other
from tfdist_ext.training.interrupts import interrupts_afterwards
from tfdist_ext.training.reading import leases_of
from tfdist_ext.training.set_delivery import bring_all
from tfdist_ext.training.set_dispatcher import SetDispatcher
from tfdist_ext.training.waiting import LOOK_AROUND_SECONDS, Waiting
from tfdist_ext.training.worker_threads import UNREACHABLE, WorkerThreads

# A ps that answers, but cannot be asked, is asked so often.
_MOST_TRIES = 20


class SetDriver(SetDispatcher):
    """Trains one model: dispatches, applies, and keeps going when workers die.

    Args:
        threads: The workers' threads.
        program: `SetProgram` of the model.
        make_ledger: Function of the version that makes a `ResumableLedger`.
        version: Updates that were applied to the model before.
        timeout_seconds: A set that is not back in this time is computed by another worker.
        patience_seconds: Longest time without a step.
    """

    def __init__(
        self, threads: WorkerThreads, program, make_ledger, version: int, timeout_seconds, patience_seconds
    ):
        super().__init__(threads, program, make_ledger(version))
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._executor = compat.synchronous_executor()
        self._ready: Apply | None = None
        self._last_read: Any = None
        with tf.device(FIRST_PS):
            self._no_factor = tf.constant(1.0)

    # --- for the caller's thread ---------------------------------------------------------------------------------
    def begin(self, data, max_steps: int | None) -> None:
        """Opens an epoch on a pass over the data.

        Args:
            data: `WorkerIterator`.
            max_steps: Updates after which the epoch ends, or None for the end of the data.
        """
        # A pass that is open was left for this one in its midst: its batches are read again.
        self._end(reads_again=True)
        self._threads.take_over(self, self._timeout_seconds, self._patience_seconds)
        self._is_suspended = False
        leases, data.lock = leases_of(data), self._changed
        self._program.trace(data.feed is not None)
        with self._changed:
            self._error = None
            self._data = data
            self._epoch += 1
            self._to_release.clear()
            self._last_read = None
            self._note_members()
            self.ledger.begin_epoch(leases, max_steps)
            self._is_open = True
            self._dispatch()

    def _go_on(self) -> None:
        """Takes the workers back from whoever had them in the meantime."""
        if self._is_suspended and self._is_open:
            self._threads.take_over(self, self._timeout_seconds, self._patience_seconds)
            with self._changed:
                self._is_suspended = False
                self._note_members()
                self._dispatch()

    def is_open_on(self, data) -> bool:
        """Returns True while an epoch on this pass over the data is open."""
        return self._is_open and self._data is data

    def use_program(self, program, arguments=()) -> None:
        """Goes on with batches of another type, or other arguments of the step; nothing is on its way."""
        self._program, self._arguments = program, list(arguments)

    @property
    def logs_are_named(self) -> bool:
        """Whether the logs of a step that was applied are a dictionary."""
        return self._program.logs.is_named

    def has_next(self, data) -> bool:
        """Waits until another step can be applied, or none will be in this pass over the data."""
        if not self.is_open_on(data):
            # The same model was trained on something else in the meantime: whoever asks for the step begins again.
            return data.max_steps != 0 and leases_of(data).has_unread
        self._go_on()
        with self._changed:
            return self._wait_for_step() is not None

    def allow(self, num_steps: int) -> None:
        """Raises the number of steps after which the open epoch ends."""
        self._go_on()
        with self._changed:
            self.ledger.allow_steps(num_steps)
            self._dispatch()

    def is_ready(self) -> bool:
        """Returns True when a step can be applied at once."""
        self._go_on()
        with self._changed:
            if self._error is None and self._ready is None:
                self._ready = self.ledger.next_apply()
            return self._error is not None or self._ready is not None

    def next_step(self):
        """Applies the next step; returns its logs, or None when the epoch is over. Raises as `next_outputs` does."""
        read = self.next_outputs()
        return None if read is None else read()

    def next_outputs(self):
        """Applies the next step.

        Returns:
            A function that fetches its logs, or None when the epoch is over.

        Raises:
            ParameterServerLostError: A ps died.
            WorkersLostError: No worker is left, and none came back in time.
        """
        self._go_on()
        while True:
            with self._changed:
                apply = self._wait_for_step()
            if apply is None:
                return None
            try:
                with compat.executing_on(self._executor):
                    lost = self._bring_all(apply)
                    if not lost:
                        return self._commit(apply)
            except BaseException as error:
                self._executor.clear_error()
                goes_on = isinstance(error, UNREACHABLE) and self._is_reached_again()
                was_applied = self._settle(apply)
                if not goes_on:
                    raise
                with self._changed:
                    self._dispatch()
                if was_applied and self._last_read is not None:
                    return self._last_read
                continue
            with self._changed:
                self._ready = None
                self.ledger.apply_failed(apply, lost)
                self._forget(lost)
                self._dispatch()

    def _is_reached_again(self) -> bool:
        """Waits until the only ps says how many steps it has applied; with several nobody could tell."""
        if self._threads.num_ps > 1:
            return False
        for _ in range(_MOST_TRIES):
            try:
                with compat.executing_on(self._executor):
                    self._program.was_committed()
                return True
            except tf.errors.OpError as error:
                self._executor.clear_error()
                if self._threads.lost_ps(error) is not None:
                    return False
                time.sleep(LOOK_AROUND_SECONDS)
        return False

    def _settle(self, apply: Apply) -> bool:
        """Finds out what became of a step whose call failed or was interrupted; writes it down, and returns it."""
        with interrupts_afterwards(), self._changed:
            if self._ready is not apply:
                return False
            try:
                was_applied = self._program.was_committed()
            except tf.errors.OpError:
                was_applied = False  # The ps are gone, and the variables with them.
            if was_applied:
                self._note_applied(apply)
            else:
                self._ready = None
                self.ledger.apply_failed(apply, [])
            return was_applied

    def close(self, data=None) -> None:
        """Ends the epoch: what is not applied by now is dropped and counted.

        With `data` only if that pass is open: Python may end the loop over a pass that was left when another has begun.
        """
        if data is None or data is self._data:
            self._end()

    def _end(self, reads_again: bool = False) -> None:
        with self._changed:
            if not self._is_open:
                return
            self._is_open = False
            if self._ready is not None:
                self._settle(self._ready)
            if reads_again:
                self._data.max_steps = self.ledger.steps_left
            self.ledger.close_epoch(reads_again)
            self._sets.clear()
            self._announce_drops()
        self._threads.let_go(self)

    def _wait_for_step(self) -> Apply | None:
        waiting = Waiting(
            self._threads, self._patience_seconds, "No step could be applied", self.ledger.waiting_for
        )
        while True:
            self._check()
            if self._ready is None:
                self._ready = self.ledger.next_apply()
            if self._ready is not None or self.ledger.epoch_finished:
                return self._ready
            self._changed.wait(LOOK_AROUND_SECONDS)
            waiting.look_around(self.ledger.version)

    def _check(self) -> None:
        if isinstance(self._error, errors.ParameterServerLostError):
            self._error.step = self.ledger.version
        if self._error is not None:
            raise self._error

    def _bring_all(self, apply: Apply) -> list[int]:
        """Brings the sets of a step to the ps; returns the ids of those that are lost."""
        with self._changed:
            sets = {admitted.set_id: self._sets.get(admitted.set_id) for admitted in apply.sets}
            known = [computed for computed in sets.values() if computed is not None and not computed.lost]
            if self._program.halves is None:
                bring_all(known, self._threads, self._changed, self.failed, self._check)
        if self._program.halves is not None and len(known) == len(sets):
            with self._naming_lost_ps():
                makers = tell_each_other(known)
            with self._changed:
                bring_all(makers, self._threads, self._changed, self.failed, self._check)
        with self._changed:
            return [set_id for set_id, computed in sets.items() if computed is None or computed.lost]

    @contextlib.contextmanager
    def _naming_lost_ps(self):
        try:
            yield
        except tf.errors.OpError as error:
            lost_ps = self._threads.lost_ps(error)
            if lost_ps is None and isinstance(error, UNREACHABLE) and self._threads.num_ps > 1:
                lost_ps = self._threads.broken_connection(error)
            if lost_ps is None:
                raise
            lost_ps.step = self.ledger.version
            raise lost_ps from error

    def _commit(self, apply: Apply):
        sets = [self._sets[admitted.set_id] for admitted in apply.sets]
        if self._program.halves is not None and self._program.halves.is_whole:
            sets = sets[:1]
        fresh = all(admitted.staleness == 0 for admitted in apply.sets)
        damped = apply.factor != 1.0
        commit = self._program.commit(len(sets), fresh, damped)
        factor = tf.constant(apply.factor, tf.float32) if damped else self._no_factor
        with interrupts_afterwards():
            with self._naming_lost_ps(), tf.device(FIRST_PS):
                outputs = commit(factor, [[*computed.wires, *computed.kept] for computed in sets])
            with self._changed:
                self._note_applied(apply)
        events.emit("step_applied", version=apply.version, sets=apply.sets)
        self._last_read = functools.partial(self._program.logs.read, outputs)
        return self._last_read

    def _note_applied(self, apply: Apply) -> None:
        self._ready = None
        self._program.note_commit()
        self.ledger.applied(apply)
        self._forget([admitted.set_id for admitted in apply.sets])
        for admitted in apply.sets:
            self._release(admitted.batches)
        self._dispatch()
