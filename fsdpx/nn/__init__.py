"""Neural-network layers, containers, losses and models. `nn.sharding` has the classes that shard models over the
tensor axis."""

from typing import TYPE_CHECKING

from fsdpx.core.base.lazy_names import make_lazy_attributes

if TYPE_CHECKING:
    from fsdpx.examples import models as models
    from fsdpx.nn import init as init, sharding as sharding
    from fsdpx.nn.activation import (
        GELU as GELU,
        Dropout as Dropout,
        ReLU as ReLU,
        Sigmoid as Sigmoid,
        SiLU as SiLU,
        Softmax as Softmax,
        Tanh as Tanh,
    )
    from fsdpx.nn.transformer import (
        MLP as MLP,
        GatedActivation as GatedActivation,
        GatedMLP as GatedMLP,
        TransformerBlock as TransformerBlock,
    )
    from fsdpx.nn.container import (
        Sequential as Sequential,
        Composite as Composite,
        Container as Container,
        Residual as Residual,
    )
    from fsdpx.ext.fields.channel_dropout import Dropout1d as Dropout1d, Dropout2d as Dropout2d, Dropout3d as Dropout3d
    from fsdpx.ext.fields.channel_norm import ChannelLayerNorm as ChannelLayerNorm
    from fsdpx.ext.fields.conv import Conv1d as Conv1d, Conv2d as Conv2d, Conv3d as Conv3d
    from fsdpx.ext.fields.convnext import ConvNeXtBlock as ConvNeXtBlock
    from fsdpx.ext.meshes.aggregate import (
        Aggregate as Aggregate, EdgeFeatures as EdgeFeatures, GatherNodes as GatherNodes,
    )  # fmt: skip
    from fsdpx.ext.meshes.edge_mlp import EdgeLinear as EdgeLinear, EdgeMLP as EdgeMLP, NodeMLP as NodeMLP
    from fsdpx.ext.meshes.ghosts import ExchangeGhosts as ExchangeGhosts
    from fsdpx.ext.meshes.graph_conv import GATConv as GATConv, GraphConv as GraphConv
    from fsdpx.ext.meshes.levels import Prolong as Prolong, Restrict as Restrict
    from fsdpx.ext.meshes.mesh_graph_net import MeshGraphNet as MeshGraphNet
    from fsdpx.ext.meshes.node_types import OneHot as OneHot, WhereType as WhereType
    from fsdpx.nn.gpt import GPT as GPT
    from fsdpx.nn.llama import Llama as Llama
    from fsdpx.ext.fields.derivatives import (
        FieldCurl as FieldCurl, FieldDerivative as FieldDerivative, FieldDivergence as FieldDivergence,
        FieldGradient as FieldGradient, FieldLaplacian as FieldLaplacian,
    )  # fmt: skip
    from fsdpx.nn.embedding import Embedding as Embedding, TokenEmbedding as TokenEmbedding
    from fsdpx.nn.encoders import (
        Bert as Bert,
        BertEmbedding as BertEmbedding,
        PatchEmbedding as PatchEmbedding,
        ViT as ViT,
    )
    from fsdpx.ext.fields.faces import (
        CellsToFaces as CellsToFaces, FaceDivergence as FaceDivergence, FacesToCells as FacesToCells,
    )  # fmt: skip
    from fsdpx.ext.fields.ensemble_loss import CRPS as CRPS
    from fsdpx.ext.fields.gradient_loss import RelativeH1 as RelativeH1
    from fsdpx.ext.fields.losses import (
        RMSE as RMSE, VRMSE as VRMSE, BandRMSE as BandRMSE, BoundaryRMSE as BoundaryRMSE,
        ConservedRMSE as ConservedRMSE, MaxError as MaxError, RelativeL2 as RelativeL2,
    )  # fmt: skip
    from fsdpx.ext.fields.multi_output import MultiOutputLoss as MultiOutputLoss
    from fsdpx.nn.lambda_layer import Lambda as Lambda
    from fsdpx.nn.graph import Graph as Graph
    from fsdpx.nn.attention_layer import MultiHeadAttention as MultiHeadAttention
    from fsdpx.nn.grouped_query_attention import (
        AttentionBlock as AttentionBlock, GroupedQueryAttention as GroupedQueryAttention,
    )  # fmt: skip
    from fsdpx.nn.per_head import Attention as Attention, HeadNorm as HeadNorm
    from fsdpx.nn.rotary import Rotary as Rotary
    from fsdpx.nn.layer import LayerContext as LayerContext, Layer as Layer, ParameterSpec as ParameterSpec
    from fsdpx.nn.linear import Linear as Linear
    from fsdpx.nn.losses import (
        MSELoss as MSELoss,
        BCEWithLogitsLoss as BCEWithLogitsLoss,
        CrossEntropyLoss as CrossEntropyLoss,
        Loss as Loss,
    )
    from fsdpx.ext.lora.lora import LoRALinear as LoRALinear, add_lora as add_lora
    from fsdpx.ext.fields.masks import FillNaN as FillNaN, Mask as Mask
    from fsdpx.ext.moe.moe import MoE as MoE
    from fsdpx.ext.fields.group_norm import GroupNorm as GroupNorm, InstanceNorm as InstanceNorm
    from fsdpx.nn.norm import BatchNorm as BatchNorm, LayerNorm as LayerNorm, RMSNorm as RMSNorm
    from fsdpx.ext.fields.normalize import Destandardize as Destandardize, Standardize as Standardize
    from fsdpx.ext.fields.pad import Pad as Pad
    from fsdpx.ext.fields.physics import MatchMean as MatchMean, PhysicsLoss as PhysicsLoss
    from fsdpx.ext.fields.pixel_shuffle import PixelShuffle as PixelShuffle, PixelUnshuffle as PixelUnshuffle
    from fsdpx.ext.fields.pool import (
        AdaptiveAvgPool1d as AdaptiveAvgPool1d, AdaptiveAvgPool2d as AdaptiveAvgPool2d,
        AdaptiveAvgPool3d as AdaptiveAvgPool3d, AvgPool1d as AvgPool1d, AvgPool2d as AvgPool2d, AvgPool3d as AvgPool3d,
        MaxPool1d as MaxPool1d, MaxPool2d as MaxPool2d, MaxPool3d as MaxPool3d,
    )  # fmt: skip
    from fsdpx.nn.rectifiers import ELU as ELU, LeakyReLU as LeakyReLU, Softplus as Softplus
    from fsdpx.ext.fields.resample import (
        ConvTranspose1d as ConvTranspose1d, ConvTranspose2d as ConvTranspose2d, ConvTranspose3d as ConvTranspose3d,
        Upsample as Upsample,
    )  # fmt: skip
    from fsdpx.nn.robust_losses import HuberLoss as HuberLoss, L1Loss as L1Loss, SmoothL1Loss as SmoothL1Loss
    from fsdpx.ext.fields.rollout import Rollout as Rollout
    from fsdpx.nn.shape import (
        Add as Add, Concat as Concat, FirstToken as FirstToken, Flatten as Flatten, Multiply as Multiply,
        Scale as Scale,
    )  # fmt: skip
    from fsdpx.ext.fields.scalars import (
        ConcatScalars as ConcatScalars, FiLM as FiLM, GlobalMax as GlobalMax, GlobalMean as GlobalMean,
        GlobalSum as GlobalSum, ScaleShift as ScaleShift, TimeEmbedding as TimeEmbedding,
    )  # fmt: skip
    from fsdpx.ext.fields.global_attention import GlobalAttention as GlobalAttention
    from fsdpx.ext.fields.neighborhood_attention import NeighborhoodAttention as NeighborhoodAttention
    from fsdpx.ext.fields.slice_attention import PhysicsAttention as PhysicsAttention
    from fsdpx.ext.fields.spectrum_loss import SpectrumRMSE as SpectrumRMSE
    from fsdpx.ext.fields.spectral import (
        FNO as FNO, PointwiseConv as PointwiseConv, ChannelScale as ChannelScale, GridEmbedding as GridEmbedding,
        SpectralConv as SpectralConv,
    )  # fmt: skip
    from fsdpx.ext.fields.static_channels import StaticChannels as StaticChannels
    from fsdpx.ext.fields.time_distributed import TimeDistributed as TimeDistributed
    from fsdpx.ext.fields.unet import UNet as UNet
    from fsdpx.ext.fields.vision_transformer import VisionTransformer as VisionTransformer
else:
    __getattr__, __dir__, __all__ = make_lazy_attributes(__name__)
