"""What is computed: layers, containers, losses and models."""

from typing import TYPE_CHECKING

from fsdpx.core.base.lazy_names import attach
from fsdpx.nn.linearize import sort as sort  # before anybody imports the module of this name

if TYPE_CHECKING:
    from fsdpx.examples import models as models
    from fsdpx.nn import init as init
    from fsdpx.nn.activation import (
        GELU as GELU, CutDropout as CutDropout, Dropout as Dropout, ReLU as ReLU, Sigmoid as Sigmoid, SiLU as SiLU,
        Softmax as Softmax, Tanh as Tanh,
    )  # fmt: skip
    from fsdpx.nn.transformer import (
        MLP as MLP,
        Gate as Gate,
        GatedMLP as GatedMLP,
        TransformerBlock as TransformerBlock,
    )
    from fsdpx.nn.container import Chain as Chain, Composite as Composite, Container as Container, Residual as Residual
    from fsdpx.ext.fields.conv import Conv1d as Conv1d, Conv2d as Conv2d, Conv3d as Conv3d
    from fsdpx.nn.sharding import (
        Column as Column, Cut as Cut, CutRequest as CutRequest, Features as Features, Own as Own,
        Positions as Positions, Row as Row, Samples as Samples, Vocab as Vocab, Whole as Whole,
    )  # fmt: skip
    from fsdpx.nn.gpt import GPT as GPT
    from fsdpx.nn.llama import Llama as Llama
    from fsdpx.ext.fields.derivatives import (
        Curl as Curl, Derivative as Derivative, Divergence as Divergence, Gradient as Gradient, Laplacian as Laplacian,
    )  # fmt: skip
    from fsdpx.nn.embedding import (
        Embedding as Embedding, PartTokenEmbedding as PartTokenEmbedding, TokenEmbedding as TokenEmbedding,
        VocabCrossEntropy as VocabCrossEntropy, VocabEmbedding as VocabEmbedding,
        VocabTokenEmbedding as VocabTokenEmbedding,
    )  # fmt: skip
    from fsdpx.nn.encoders import Bert as Bert, BertEmbedding as BertEmbedding, Patches as Patches, ViT as ViT
    from fsdpx.ext.fields.losses import (
        RMSE as RMSE, VRMSE as VRMSE, BandRMSE as BandRMSE, BoundaryRMSE as BoundaryRMSE,
        ConservedRMSE as ConservedRMSE, MaxError as MaxError, RelativeL2 as RelativeL2,
    )  # fmt: skip
    from fsdpx.nn.lambda_layer import Lambda as Lambda
    from fsdpx.nn.graph import Graph as Graph
    from fsdpx.nn.attention_layer import MultiHeadAttention as MultiHeadAttention
    from fsdpx.nn.grouped_query_attention import (
        AttentionBlock as AttentionBlock, GroupedQueryAttention as GroupedQueryAttention,
    )  # fmt: skip
    from fsdpx.nn.per_head import Attention as Attention, HeadNorm as HeadNorm
    from fsdpx.nn.rotary import Rotary as Rotary
    from fsdpx.nn.layer import Env as Env, Layer as Layer, Portion as Portion, Spec as Spec
    from fsdpx.nn.linear import ColumnLinear as ColumnLinear, Linear as Linear, RowLinear as RowLinear
    from fsdpx.nn.losses import (
        MSE as MSE, BCEWithLogits as BCEWithLogits, CrossEntropy as CrossEntropy, Loss as Loss, Planned as Planned,
    )  # fmt: skip
    from fsdpx.ext.lora.lora import LoRALinear as LoRALinear, lora as lora
    from fsdpx.ext.fields.masks import FillNaN as FillNaN, Mask as Mask
    from fsdpx.ext.moe.moe import CutMoE as CutMoE, MoE as MoE
    from fsdpx.ext.fields.group_norm import GroupNorm as GroupNorm, InstanceNorm as InstanceNorm
    from fsdpx.nn.norm import BatchNorm as BatchNorm, LayerNorm as LayerNorm, RMSNorm as RMSNorm
    from fsdpx.ext.fields.normalize import Denormalize as Denormalize, Normalize as Normalize
    from fsdpx.ext.fields.pad import Pad as Pad
    from fsdpx.ext.fields.physics import Conserve as Conserve, PhysicsLoss as PhysicsLoss
    from fsdpx.nn.tensor_plan import parallelise as parallelise
    from fsdpx.ext.fields.pool import (
        AdaptiveAvgPool1d as AdaptiveAvgPool1d, AdaptiveAvgPool2d as AdaptiveAvgPool2d,
        AdaptiveAvgPool3d as AdaptiveAvgPool3d, AvgPool1d as AvgPool1d, AvgPool2d as AvgPool2d, AvgPool3d as AvgPool3d,
        MaxPool1d as MaxPool1d, MaxPool2d as MaxPool2d, MaxPool3d as MaxPool3d,
    )  # fmt: skip
    from fsdpx.ext.fields.resample import (
        ConvTranspose1d as ConvTranspose1d, ConvTranspose2d as ConvTranspose2d, ConvTranspose3d as ConvTranspose3d,
        Upsample as Upsample,
    )  # fmt: skip
    from fsdpx.ext.fields.rollout import Rollout as Rollout
    from fsdpx.nn.sequence import Enter as Enter, Framed as Framed, Leave as Leave, SequenceLoss as SequenceLoss
    from fsdpx.nn.shape import (
        Add as Add, Concat as Concat, First as First, Flatten as Flatten, Multiply as Multiply, Scale as Scale,
    )  # fmt: skip
    from fsdpx.nn.linearize import (
        Node as Node,
        Sorted as Sorted,
        infer as infer,
        shapes as shapes,
        specs_of as specs_of,
    )
    from fsdpx.ext.fields.spectral import (
        FNO as FNO, ChannelLinear as ChannelLinear, ChannelScale as ChannelScale, GridEmbedding as GridEmbedding,
        SpectralConv as SpectralConv,
    )  # fmt: skip
    from fsdpx.ext.fields.unet import UNet as UNet
else:
    __getattr__, __dir__, __all__ = attach(__name__)
