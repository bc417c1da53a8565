"""Where does it run?

Which parameter server holds which variable is decided here from sizes alone; nothing here imports TensorFlow.
To split one variable into shards use TensorFlow's own `tf.distribute.experimental.partitioners`.
"""

from tfdist_ext.placement.variables import PlacementRow, PlacementTable, largest_first

__all__ = ["PlacementRow", "PlacementTable", "largest_first"]
