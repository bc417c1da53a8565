"""How is a variable read that every replica adds to?

TensorFlow's `SyncOnReadVariable` keeps a part on every replica and sums the parts over all workers at each
read: a read on the chief alone blocks for ever. After a step of this package every replica holds the *whole*
value (it was summed with the gradients), so that a read is local. Only a custom training loop that adds to
the variable inside `strategy.run` makes it hold parts.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import compat


class MetricVariable(compat.SyncOnReadVariable):
    """A sync-on-read variable that is whole on every replica unless a custom loop wrote parts to it."""

    holds_parts = False

    def _first_component(self):
        return self._values[0]

    def become_parts(self) -> None:
        """Keeps the value in slot 0 and zeroes the rest, so that the sum of the parts is the value."""
        if self.holds_parts:
            return
        self.holds_parts = True
        with tf.init_scope():
            extended = self.distribute_strategy.extended
            for local, component in enumerate(self._values):
                if extended.slot_of_local_replica(local) != 0:
                    component.assign(tf.zeros_like(component))

    def become_whole(self) -> None:
        """Sums the parts over all replicas and workers into every replica; every worker must call it."""
        if not self.holds_parts:
            return
        with tf.init_scope():
            total = self._get_cross_replica()
            self.holds_parts = False
            for component in self._values:
                component.assign(total)

    def _is_sum(self) -> bool:
        return self._aggregation == tf.VariableAggregation.SUM

    def _get_cross_replica(self):
        if self.holds_parts:
            return super()._get_cross_replica()
        return tf.identity(self._first_component())

    def _in_plain_cross_replica_context(self) -> bool:
        with compat.enter_or_assert_strategy(self.distribute_strategy):
            return tf.distribute.in_cross_replica_context() and not compat.in_replica_update_context()

    def _assign_everywhere(self, operation, value, read_value):
        if compat.in_saving_context():
            return getattr(self._primary, operation)(value)
        for local, component in enumerate(self._values):
            part = value
            if self.holds_parts and self.distribute_strategy.extended.slot_of_local_replica(local) != 0:
                part = tf.zeros_like(component)
            getattr(component, operation)(part)
        return self._get_cross_replica() if read_value else None

    def _note_replica_write(self) -> None:
        # Written by the user's own replica function, not by our apply: from now on replicas hold parts.
        if self._is_sum() and not compat.in_replica_update_context():
            self.become_parts()

    def assign(self, value, use_locking=False, name=None, read_value=True):
        """See `tf.Variable.assign`."""
        if self._in_plain_cross_replica_context():
            return self._assign_everywhere("assign", value, read_value)
        self._note_replica_write()
        return super().assign(value, use_locking, name, read_value)

    def assign_add(self, value, use_locking=False, name=None, read_value=True):
        """See `tf.Variable.assign_add`."""
        if self._in_plain_cross_replica_context():
            return self._assign_everywhere("assign_add", value, read_value)
        self._note_replica_write()
        return super().assign_add(value, use_locking, name, read_value)

    def assign_sub(self, value, use_locking=False, name=None, read_value=True):
        """See `tf.Variable.assign_sub`."""
        if self._in_plain_cross_replica_context():
            return self._assign_everywhere("assign_sub", value, read_value)
        self._note_replica_write()
        return super().assign_sub(value, use_locking, name, read_value)

    def _gather_saveables_for_checkpoint(self):
        variable = self

        class _WholeSaveable(compat.MirroredSaveable):
            def restore(self, restored_tensors, restored_shapes):
                (tensor,) = restored_tensors
                return variable._assign_everywhere("assign", tensor, read_value=True)

        return {"VARIABLE_VALUE": lambda name=self._common_name: _WholeSaveable(self, self._primary, name)}
