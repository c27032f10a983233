"""What is computed: layers, containers, losses and models."""

from typing import TYPE_CHECKING, Any

from fsdpx.nn import init, models
from fsdpx.nn.activation import GELU, CutDropout, Dropout, ReLU, Sigmoid, SiLU, Softmax, Tanh
from fsdpx.nn.block import MLP, Gate, GatedMLP, TransformerBlock
from fsdpx.nn.container import Chain, Composite, Container, Residual
from fsdpx.nn.conv import Conv1d, Conv2d, Conv3d
from fsdpx.nn.cut import Column, Cut, CutRequest, Features, Own, Positions, Row, Samples, Vocab, Whole
from fsdpx.nn.decoders import GPT, Llama
from fsdpx.nn.derivatives import Curl, Derivative, Divergence, Gradient, Laplacian
from fsdpx.nn.embedding import (
    Embedding,
    PartTokenEmbedding,
    TokenEmbedding,
    VocabCrossEntropy,
    VocabEmbedding,
    VocabTokenEmbedding,
)  # fmt: skip
from fsdpx.nn.encoders import Bert, BertEmbedding, Patches, ViT
from fsdpx.nn.fieldlosses import RMSE, VRMSE, BandRMSE, BoundaryRMSE, ConservedRMSE, MaxError, RelativeL2
from fsdpx.nn.function import Lambda
from fsdpx.nn.graph import Graph
from fsdpx.nn.grouped import AttentionBlock, GroupedQueryAttention, MultiHeadAttention
from fsdpx.nn.heads import Attention, HeadNorm, Rotary
from fsdpx.nn.layer import Env, Layer, Portion, Spec
from fsdpx.nn.linear import ColumnLinear, Linear, RowLinear
from fsdpx.nn.losses import MSE, BCEWithLogits, CrossEntropy, Loss
from fsdpx.nn.lowrank import LoRALinear, lora
from fsdpx.nn.masks import FillNaN, Mask
from fsdpx.nn.moe import CutMoE, MoE
from fsdpx.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from fsdpx.nn.normalize import Denormalize, Normalize
from fsdpx.nn.pad import Pad
from fsdpx.nn.physics import Conserve, PhysicsLoss
from fsdpx.nn.plan import Planned, parallelise
from fsdpx.nn.pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from fsdpx.nn.resample import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Upsample
from fsdpx.nn.rollout import Rollout
from fsdpx.nn.sequence import Enter, Framed, Leave, SequenceLoss
from fsdpx.nn.shape import Add, Concat, First, Flatten, Multiply, Scale
from fsdpx.nn.sort import Node, Sorted, infer, shapes, sort, specs_of
from fsdpx.nn.spectral import FNO, ChannelLinear, ChannelScale, GridEmbedding, SpectralConv
from fsdpx.nn.unet import UNet
from fsdpx.words import absent

__all__ = [
    "FNO", "GELU", "GPT", "MLP", "MSE", "RMSE", "VRMSE", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d", "Add", "Attention", "AttentionBlock", "AvgPool1d", "AvgPool2d", "AvgPool3d",
    "BCEWithLogits", "BandRMSE", "BatchNorm", "Bert", "BertEmbedding", "BoundaryRMSE", "Chain", "ChannelLinear",
    "ChannelScale", "Column", "ColumnLinear", "Composite", "Concat", "Conserve", "ConservedRMSE", "Container",
    "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "CrossEntropy", "Curl",
    "Cut", "CutDropout", "CutMoE", "CutRequest", "Denormalize", "Derivative", "Divergence", "Dropout", "Embedding",
    "Enter", "Env", "Features", "FillNaN", "First", "Flatten", "Framed", "Gate", "GatedMLP", "Gradient", "Graph",
    "GridEmbedding", "GroupNorm", "GroupedQueryAttention", "HeadNorm", "InstanceNorm", "Lambda", "Laplacian",
    "Layer", "LayerNorm", "Leave", "Linear", "Llama", "LoRALinear", "Loss", "Mask", "MaxError", "MaxPool1d",
    "MaxPool2d", "MaxPool3d", "MoE", "MultiHeadAttention", "Multiply", "Node", "Normalize", "Own", "Pad",
    "PartTokenEmbedding", "Patches", "PhysicsLoss", "Planned", "Portion", "Positions", "RMSNorm", "ReLU",
    "RelativeL2", "Residual", "Rollout", "Rotary", "Row", "RowLinear", "Samples", "Scale", "SequenceLoss", "SiLU",
    "Sigmoid", "Softmax", "Sorted", "Spec", "SpectralConv", "Tanh", "TokenEmbedding", "TransformerBlock", "UNet",
    "Upsample", "ViT", "Vocab", "VocabCrossEntropy", "VocabEmbedding", "VocabTokenEmbedding", "Whole", "infer",
    "init", "lora", "models", "parallelise", "shapes", "sort", "specs_of",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> Any:
        raise absent(__name__, name, __all__)
