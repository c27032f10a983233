"""The layers of fields keep the contract that `fsdpx.testing.LayerContract` tests."""

from layer_cases import contract_tests, rows

from fsdpx import nn


def make_step_on_faces():
    """Map two velocities on 6 faces, and two pressures and a depth in 5 cells, to the next velocity and pressure."""
    nodes = {
        "inside": (nn.FacesToCells(0), "velocity"),
        "both": (nn.Concat(1), "inside", "pressure"),
        "film": (nn.FiLM(2, 5), "both", "s"),
        "next": (nn.Sequential(nn.Conv1d(5, 1, 3, padding=1), nn.Tanh()), "film"),
        "push": (nn.CellsToFaces(0), "next"),
    }
    return nn.Graph(nodes, inputs=("velocity", "pressure", "s"), outputs=("push", "next"))


CASES = {
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3), lambda: rows(3, 2, 5, 6)),
    "Conv2dStrided": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
        lambda: rows(3, 2, 6, 5),
    ),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), lambda: rows(3, 2, 5, 6)),
    "MaxPool2dOverlapping": (lambda: nn.MaxPool2d(3, stride=2, padding=1), lambda: rows(3, 2, 5, 6)),
    "AvgPool2d": (lambda: nn.AvgPool2d(3, stride=(1, 2), padding=1), lambda: rows(3, 2, 5, 6)),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(3), lambda: rows(3, 2, 7)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((2, 9)), lambda: rows(3, 2, 5, 6)),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(1), lambda: rows(3, 2, 3, 4, 2)),
    "Conv1d": (lambda: nn.Conv1d(2, 4, 3, 2, 1, groups=2, padding_mode="circular"), lambda: rows(3, 2, 7)),
    "Conv2dDilated": (lambda: nn.Conv2d(2, 3, 2, 1, 1, 2, padding_mode="reflect"), lambda: rows(3, 2, 5, 6)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 3, padding="same", padding_mode="replicate"), lambda: rows(3, 2, 3, 4, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 2, 3, 2, 1, 1, groups=2), lambda: rows(3, 4, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2, 2), lambda: rows(3, 2, 3, 4)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 2, 2, dilation=2, bias=False), lambda: rows(3, 2, 2, 3, 2)),
    "MaxPool1d": (lambda: nn.MaxPool1d(3, 2, 1, 2), lambda: rows(3, 2, 8)),
    "MaxPool3d": (lambda: nn.MaxPool3d(2, ceil_mode=True), lambda: rows(3, 2, 3, 4, 5)),
    "AvgPool1d": (lambda: nn.AvgPool1d(3, 2, 1, True), lambda: rows(3, 2, 6)),
    "AvgPool3d": (lambda: nn.AvgPool3d(2, 1, 1, False, False), lambda: rows(3, 2, 3, 2, 3)),
    "UpsampleNearest": (lambda: nn.Upsample(scale_factor=2), lambda: rows(3, 2, 5)),
    "UpsampleBicubic": (lambda: nn.Upsample((4, 7), mode="bicubic"), lambda: rows(3, 2, 3, 5)),
    "UpsampleTrilinear": (lambda: nn.Upsample(None, 1.5, "trilinear", True), lambda: rows(3, 2, 2, 3, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: rows(3, 4, 5)),
    "InstanceNorm": (lambda: nn.InstanceNorm(3, affine=True), lambda: rows(3, 3, 4, 2)),
    "ChannelLayerNorm": (lambda: nn.ChannelLayerNorm(4, 1e-3), lambda: rows(3, 4, 5, 2)),
    "ConvNeXtBlock": (lambda: nn.ConvNeXtBlock(4, 2, 3, 2, 0.5, "circular"), lambda: rows(3, 4, 5, 6)),
    "ConvNeXtBlockOfLines": (lambda: nn.ConvNeXtBlock(4, 1, 5, 3, None), lambda: rows(3, 4, 7)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), lambda: rows(3, 8, 2, 3)),
    "PixelShuffleOfLines": (lambda: nn.PixelShuffle(3), lambda: rows(3, 6, 4)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), lambda: rows(3, 2, 4, 2, 6)),
    "Dropout1d": (lambda: nn.Dropout1d(0.3), lambda: rows(3, 4, 5)),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), lambda: rows(3, 4, 5, 2)),
    "Dropout3d": (lambda: nn.Dropout3d(0.3), lambda: rows(3, 4, 2, 2, 2)),
    "UNet": (lambda: nn.UNet(2, 3, 2, 2, 1, norm="group", activation="gelu"), lambda: rows(3, 2, 4, 6)),
    "UNetOfTime": (
        lambda: nn.UNet(2, 3, 1, 2, 1, norm="group", activation="silu", time_embedding=4, attention=2),
        lambda: (rows(3, 2, 6), rows(3, 1)),
    ),
    "SpectralConv": (lambda: nn.SpectralConv(2, 3, (3, 4)), lambda: rows(3, 2, 5, 6)),
    "SpectralConvOfLines": (lambda: nn.SpectralConv(2, 3, 6, bias=False), lambda: rows(3, 2, 7)),
    "PointwiseConv": (lambda: nn.PointwiseConv(3, 4), lambda: rows(3, 3, 4, 2)),
    "ChannelScale": (lambda: nn.ChannelScale(3, 2), lambda: rows(3, 3, 4, 2)),
    "GridEmbedding": (nn.GridEmbedding, lambda: rows(3, 2, 4, 3)),
    "Rollout": (
        lambda: nn.Rollout(nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 2, 1)), 3),
        lambda: rows(3, 2, 5),
    ),
    "RolloutOfFields": (
        lambda: nn.Rollout(make_step_on_faces(), 2, inputs=2, constants=(0, 1), forcing="s"),
        lambda: (rows(3, 2, 6), rows(3, 3, 5), rows(3, 4)),
    ),
    "TimeDistributed": (
        lambda: nn.TimeDistributed(nn.Sequential(nn.Conv1d(2, 3, 3), nn.GlobalSum(), nn.Linear(3, 2)), 3),
        lambda: rows(3, 6, 5),
    ),
    "FNO": (lambda: nn.FNO(2, 3, (2, 4), 4, 2), lambda: rows(3, 2, 4, 6)),
    "Standardize": (lambda: nn.Standardize([1.0, -2.0], [3.0, 0.5]), lambda: rows(3, 2, 4)),
    "Destandardize": (lambda: nn.Destandardize([1.0, -2.0], [3.0, 0.5]), lambda: rows(3, 2, 4)),
    "Derivative": (lambda: nn.FieldDerivative(0, 2, 0.5, True, 4), lambda: rows(3, 2, 6)),
    "Gradient": (lambda: nn.FieldGradient(0.5, (True, False), 4), lambda: rows(3, 2, 5, 6)),
    "Divergence": (lambda: nn.FieldDivergence(along=(1, 0)), lambda: rows(3, 4, 5, 6)),
    "Curl": (nn.FieldCurl, lambda: rows(3, 3, 4, 5, 4)),
    "Laplacian": (lambda: nn.FieldLaplacian(2.0, True), lambda: rows(3, 2, 5, 3)),
    "DerivativeStretched": (lambda: nn.FieldDerivative(0, 1, ([0, 1, 3, 4, 6, 7, 9],), True), lambda: rows(3, 2, 6)),
    "CellsToFaces": (lambda: nn.CellsToFaces(1, 1, [0, 1, 3, 4]), lambda: rows(3, 2, 4, 3)),
    "FacesToCells": (lambda: nn.FacesToCells(0, faces="high"), lambda: rows(3, 2, 4, 3)),
    "FaceDivergence": (
        lambda: nn.FaceDivergence(2, ([0, 1, 3, 4, 6], 0.5), "low", ("zeros", "circular"), (1, 0)),
        lambda: rows(3, 2, 4, 3),
    ),
    "MatchMean": (nn.MatchMean, lambda: (rows(3, 2, 5), rows(3, 2, 5) + 1.0)),
    "Pad": (lambda: nn.Pad(((2, 0), (-1, 3)), "reflect"), lambda: rows(3, 2, 4, 5)),
    "FNOPlain": (lambda: nn.FNO(2, 3, (2, 2), 4, 1, 5, 3, 2, False), lambda: rows(3, 2, 4, 4)),
    "ConcatScalars": (nn.ConcatScalars, lambda: (rows(3, 2, 4, 5), rows(3, 2) + 1.0)),
    "ScaleShift": (nn.ScaleShift, lambda: (rows(3, 2, 5), rows(3, 4) + 1.0)),
    "FiLM": (lambda: nn.FiLM(3, 2), lambda: (rows(3, 2, 4), rows(3, 3) + 1.0)),
    "TimeEmbedding": (lambda: nn.TimeEmbedding(6, 10.0), lambda: rows(4, 1)),
    "GlobalMean": (lambda: nn.GlobalMean([[1.0, 2.0, 0.5]]), lambda: rows(3, 2, 1, 3)),
    "GlobalSum": (nn.GlobalSum, lambda: rows(3, 2, 4)),
    "GlobalMax": (nn.GlobalMax, lambda: rows(3, 2, 4)),
    "GlobalAttention": (lambda: nn.GlobalAttention(4, 2), lambda: rows(3, 4, 3, 2)),
    "NeighborhoodAttention": (lambda: nn.NeighborhoodAttention(4, 2, 3), lambda: rows(3, 4, 3, 9)),
    "PhysicsAttention": (lambda: nn.PhysicsAttention(4, 2, 3, 3), lambda: rows(3, 4, 3, 2)),
    "PhysicsAttentionOfPoints": (lambda: nn.PhysicsAttention(6, 3, 4), lambda: rows(3, 6, 5)),
    "VisionTransformer": (lambda: nn.VisionTransformer(2, 3, 2, 2, 4, 1, 2, "physics"), lambda: rows(3, 2, 4, 2)),
    "VisionTransformerOfLines": (
        lambda: nn.VisionTransformer(1, 2, 1, 3, 4, 1, 2, hidden=3, positions=False),
        lambda: rows(3, 1, 9),
    ),
    "GroupNormOfVolumes": (
        lambda: nn.GroupNorm(2, 4, weights=[[1.0, 2.0, 0.5], [0.0, 3.0, 1.0]]),
        lambda: rows(3, 4, 2, 3),
    ),
    "InstanceNormOfVolumes": (
        lambda: nn.InstanceNorm(2, weights=[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[6.0, 5.0, 4.0], [3.0, 2.0, 1.0]]]),
        lambda: rows(3, 2, 2, 3),
    ),
    "StaticChannels": (lambda: nn.StaticChannels([[1.0, 2.0], [3.0, 4.0]]), lambda: rows(3, 2, 2)),
    "FillNaN": (nn.FillNaN, lambda: rows(4, 6)),
    "Mask": (lambda: nn.Mask([[True, False, True], [True, True, False]], 2.0), lambda: rows(3, 2, 2, 3)),
}

globals().update(contract_tests(CASES, "fsdpx.ext.fields"))
