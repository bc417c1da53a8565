"""Which Keras layers span tasks?"""

from tfdist_ext.layers.sharded_embedding import ShardedEmbedding

__all__ = ["ShardedEmbedding"]
