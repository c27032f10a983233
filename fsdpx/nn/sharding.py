"""Classes that shard layers, losses and models over the tensor axis, for use in the `tensor_plan` option and in custom
layers."""

from typing import TYPE_CHECKING

from fsdpx.core.base.lazy_names import make_lazy_attributes

if TYPE_CHECKING:
    from fsdpx.ext.moe.moe import ShardedMoE as ShardedMoE
    from fsdpx.nn.activation import ShardedDropout as ShardedDropout
    from fsdpx.nn.embedding import (
        SequenceParallelTokenEmbedding as SequenceParallelTokenEmbedding,
        VocabParallelCrossEntropyLoss as VocabParallelCrossEntropyLoss,
        VocabParallelEmbedding as VocabParallelEmbedding,
        VocabParallelTokenEmbedding as VocabParallelTokenEmbedding,
    )
    from fsdpx.nn.layer import ShardedLayer as ShardedLayer
    from fsdpx.nn.linear import ColumnParallelLinear as ColumnParallelLinear, RowParallelLinear as RowParallelLinear
    from fsdpx.nn.layer_list import (
        LayerList as LayerList,
        Node as Node,
        linearize as linearize,
        parameter_specs as parameter_specs,
    )
    from fsdpx.nn.losses import TensorParallelModel as TensorParallelModel
    from fsdpx.nn.sequence import (
        AllGatherFeatures as AllGatherFeatures,
        ShardedSequenceLoss as ShardedSequenceLoss,
        SplitSequence as SplitSequence,
        WithInputOutput as WithInputOutput,
    )
    from fsdpx.nn.shard_specs import (
        ColumnParallel as ColumnParallel,
        LayerDefault as LayerDefault,
        Replicated as Replicated,
        RowParallel as RowParallel,
        ShardSpec as ShardSpec,
        ShardedBatch as ShardedBatch,
        ShardedFeatures as ShardedFeatures,
        ShardedSequence as ShardedSequence,
        ShardingContext as ShardingContext,
        VocabParallel as VocabParallel,
    )
    from fsdpx.nn.shape_inference import output_shapes as output_shapes, value_shapes as value_shapes
    from fsdpx.nn.tensor_plan import parallelize as parallelize
else:
    __getattr__, __dir__, __all__ = make_lazy_attributes(__name__)
