"""All optimisers keep the contract, with compiled and with plain kernels."""

import pytest

from fsdpx import optim
from fsdpx.optim import kernels
from fsdpx.optim.average import Averaged
from fsdpx.testing.optimizer import OptimizerContract


@pytest.fixture(params=["plain", "numba"], autouse=True)
def version(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(kernels, "_compiled", lambda: None)


class TestSGD(OptimizerContract):
    def make(self, **options):
        return optim.SGD(**options)


class TestMomentum(OptimizerContract):
    def make(self, **options):
        return optim.SGD(momentum=0.9, **options)


class TestNesterov(OptimizerContract):
    def make(self, **options):
        return optim.SGD(momentum=0.9, nesterov=True, **options)


class TestAdam(OptimizerContract):
    def make(self, **options):
        return optim.Adam(**options)


class TestAdamW(OptimizerContract):
    def make(self, **options):
        return optim.AdamW(**options)


class TestLion(OptimizerContract):
    def make(self, **options):
        return optim.Lion(**options)


class TestEMA(OptimizerContract):
    def make(self, **options):
        return Averaged(optim.AdamW(**options), optim.EMA(0.9))


class TestSWA(OptimizerContract):
    def make(self, **options):
        return Averaged(optim.SGD(**options), optim.SWA(start=2))


class TestMuon(OptimizerContract):
    def make(self, **options):
        return optim.Muon(**options)


class TestLAMB(OptimizerContract):
    grain = 1024

    def make(self, **options):
        return optim.LAMB(**options)
