"""How is an embedding table kept that no single parameter server should hold?"""

from __future__ import annotations

import keras
import tensorflow as tf
from absl import logging

from tfdist_ext.strategies.parameter_server import ParameterServerStrategy
from tfdist_ext.strategies.parameter_server_variables import mark_lazy


@keras.saving.register_keras_serializable(package="tfdist_ext")
class ShardedEmbedding(keras.layers.Embedding):
    """An embedding whose table is split by rows over the parameter servers.

    Only the rows that a batch touches travel, each once: to the worker, and their summed gradients back. With SGD and
    Adagrad only those rows are updated, and the result is Keras' own. Adam and momentum move all rows in every step,
    touched or not; so do they here, on the ps, unless `lazy` is set.

    Without a ParameterServerStrategy it is a `keras.layers.Embedding`.

    Args:
        input_dim: Number of rows.
        output_dim: Width of a row.
        num_shards: Number of shards; None for one on each ps.
        lazy: True updates the touched rows only, under every optimizer: moments of other rows stand still. That is
            another algorithm than Keras' ("LazyAdam"); rare rows keep their momentum until they come up again.
        **kwargs: As for `keras.layers.Embedding`.

    Input shape: integers of any shape. Output shape: that shape + `[output_dim]`.

    Example:
        >>> layer = ShardedEmbedding(10, 4)
        >>> tuple(layer(keras.ops.convert_to_tensor([[1, 2, 1]])).shape)
        (1, 3, 4)
    """

    def __init__(
        self, input_dim, output_dim, *args, num_shards: int | None = None, lazy: bool = False, **kwargs
    ):
        if num_shards is not None and num_shards < 1:
            raise ValueError(f"Argument `num_shards` must be at least 1, or None; received {num_shards}.")
        super().__init__(input_dim, output_dim, *args, **kwargs)
        self.num_shards = num_shards
        self.lazy = lazy

    def build(self, input_shape=None):
        """See `keras.layers.Layer`."""
        strategy = tf.distribute.get_strategy()
        if isinstance(strategy, ParameterServerStrategy):
            number = self.num_shards or strategy.num_ps
            partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(number)
            with strategy.extended.placer.splitting_by(partitioner):
                super().build(input_shape)
        else:
            super().build(input_shape)
            if self.lazy:
                logging.info("`lazy` of layer `%s` counts under a ParameterServerStrategy only.", self.name)
        if self.lazy:
            mark_lazy(self._embeddings)

    def get_config(self):
        """See `keras.layers.Layer`."""
        return {**super().get_config(), "num_shards": self.num_shards, "lazy": self.lazy}
