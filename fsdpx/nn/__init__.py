"""What is computed: layers, containers, losses and models."""

from fsdpx.nn import init
from fsdpx.nn.activation import GELU, ReLU, Sigmoid, SiLU, Softmax, Tanh
from fsdpx.nn.attention import MultiHeadAttention
from fsdpx.nn.batchnorm import BatchNorm
from fsdpx.nn.block import MLP, TransformerBlock
from fsdpx.nn.container import Chain, Container, Residual
from fsdpx.nn.conv import AvgPool2d, Conv2d, MaxPool2d
from fsdpx.nn.dropout import Dropout
from fsdpx.nn.embedding import Embedding
from fsdpx.nn.gpt import GPT, TokenEmbedding
from fsdpx.nn.graph import Graph
from fsdpx.nn.layer import Env, Layer, Spec
from fsdpx.nn.linear import Linear
from fsdpx.nn.losses import MSE, BCEWithLogits, CrossEntropy, Loss
from fsdpx.nn.norm import LayerNorm, RMSNorm
from fsdpx.nn.shape import Add, Concat, Flatten
from fsdpx.nn.sort import Node, Sorted, infer, shapes, sort, specs_of

__all__ = [
    "GELU",
    "GPT",
    "MLP",
    "MSE",
    "Add",
    "AvgPool2d",
    "BCEWithLogits",
    "BatchNorm",
    "Chain",
    "Concat",
    "Container",
    "Conv2d",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "Env",
    "Flatten",
    "Graph",
    "Layer",
    "LayerNorm",
    "Linear",
    "Loss",
    "MaxPool2d",
    "MultiHeadAttention",
    "Node",
    "RMSNorm",
    "ReLU",
    "Residual",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Sorted",
    "Spec",
    "Tanh",
    "TokenEmbedding",
    "TransformerBlock",
    "infer",
    "init",
    "shapes",
    "sort",
    "specs_of",
]
