"""A ledger with its workers, for tests by hand."""

from tfdist_ext.ps import Leases, Ledger


class Table:
    """An open epoch, and what each worker computes.

    Every shard is long unless lengths are given; time is set by the test.
    """

    def __init__(self, policy, num_workers, lengths=None, *, max_steps=None, **options):
        self.now = 0.0
        self.ledger = Ledger(policy, num_workers, clock=lambda: self.now, **options)
        self.leases = Leases(len(lengths) if lengths else num_workers, lengths)
        for worker in range(num_workers):
            self.ledger.joined(worker)
        self.ledger.begin_epoch(self.leases, max_steps)
        self.computing = {}
        self.last = {}

    def dispatch(self):
        """Starts what may start, and returns {worker: (shard, position) of the first batch}."""
        started = self.ledger.dispatches()
        self.ledger.check()
        for one in started:
            self.computing[one.worker] = self.last[one.worker] = one
        return {one.worker: tuple(one.batches[0]) for one in started}

    def arrive(self, worker, rows=1):
        outcome = self.ledger.arrived(self.computing.pop(worker).set_id, rows).outcome
        self.ledger.check()
        return outcome

    def run_out(self, worker, batch):
        self.ledger.ran_out(self.computing.pop(worker).set_id, batch)
        self.ledger.check()

    def lose(self, worker):
        self.computing.pop(worker, None)
        self.ledger.lost(worker)
        self.ledger.check()

    def join(self, worker):
        self.ledger.joined(worker)
        self.ledger.check()

    def apply(self):
        """Applies the next step, and returns [(slot, worker, first batch)], or None if there is none."""
        apply = self.ledger.next_apply()
        self.ledger.check()
        if apply is None:
            return None
        self.ledger.applied(apply)
        self.ledger.check()
        self.applied = apply
        return [(one.slot, one.worker, tuple(one.batches[0])) for one in apply.sets]
