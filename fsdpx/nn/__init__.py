"""What is computed: layers, containers, losses and models."""

from fsdpx.nn import init, models
from fsdpx.nn.activation import GELU, CutDropout, Dropout, ReLU, Sigmoid, SiLU, Softmax, Tanh
from fsdpx.nn.block import MLP, Gate, GatedMLP, TransformerBlock
from fsdpx.nn.container import Chain, Composite, Container, Residual
from fsdpx.nn.conv import AvgPool2d, Conv2d, MaxPool2d
from fsdpx.nn.cut import Column, Cut, CutRequest, Features, Own, Positions, Row, Samples, Vocab, Whole
from fsdpx.nn.decoders import GPT, Llama
from fsdpx.nn.embedding import (
    Embedding,
    PartTokenEmbedding,
    TokenEmbedding,
    VocabCrossEntropy,
    VocabEmbedding,
    VocabTokenEmbedding,
)  # fmt: skip
from fsdpx.nn.encoders import Bert, BertEmbedding, Patches, ViT
from fsdpx.nn.function import Lambda
from fsdpx.nn.graph import Graph
from fsdpx.nn.grouped import AttentionBlock, GroupedQueryAttention, MultiHeadAttention
from fsdpx.nn.heads import Attention, HeadNorm, Rotary
from fsdpx.nn.layer import Env, Layer, Portion, Spec
from fsdpx.nn.linear import ColumnLinear, Linear, RowLinear
from fsdpx.nn.losses import MSE, BCEWithLogits, CrossEntropy, Loss
from fsdpx.nn.lowrank import LoRALinear, lora
from fsdpx.nn.moe import CutMoE, MoE
from fsdpx.nn.norm import BatchNorm, LayerNorm, RMSNorm
from fsdpx.nn.plan import Planned, parallelise
from fsdpx.nn.sequence import Enter, Framed, Leave, SequenceLoss
from fsdpx.nn.shape import Add, Concat, First, Flatten, Multiply, Scale
from fsdpx.nn.sort import Node, Sorted, infer, shapes, sort, specs_of

__all__ = [
    "GELU", "GPT", "MLP", "MSE", "Add", "Attention", "AttentionBlock", "AvgPool2d", "BCEWithLogits", "BatchNorm",
    "Bert", "BertEmbedding", "Chain", "Column", "ColumnLinear", "Composite", "Concat", "Container", "Conv2d",
    "CrossEntropy", "Cut", "CutDropout", "CutMoE", "CutRequest", "Dropout", "Embedding", "Enter", "Env", "Features",
    "First", "Flatten", "Framed", "Gate", "GatedMLP", "Graph", "GroupedQueryAttention", "HeadNorm", "Lambda",
    "Layer", "LayerNorm", "Leave", "Linear", "Llama", "LoRALinear", "Loss", "MaxPool2d", "MoE",
    "MultiHeadAttention", "Multiply", "Node", "Own", "PartTokenEmbedding", "Patches", "Planned", "Portion",
    "Positions", "RMSNorm", "ReLU", "Residual", "Rotary", "Row", "RowLinear", "Samples", "Scale", "SequenceLoss",
    "SiLU", "Sigmoid", "Softmax", "Sorted", "Spec", "Tanh", "TokenEmbedding", "TransformerBlock", "ViT", "Vocab",
    "VocabCrossEntropy", "VocabEmbedding", "VocabTokenEmbedding", "Whole", "infer", "init", "lora", "models",
    "parallelise", "shapes", "sort", "specs_of",
]  # fmt: skip
