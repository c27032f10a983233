"""Tests of the contract of layers from a table: of layers of the core here, of those of an extension beside it."""

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
from setting import env, gradients, normal, parameters

from fsdpx import nn
from fsdpx.core.array.kernels import choice
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.lazy_names import _map_names_to_modules as homes_of
from fsdpx.core.engine.warmup import warm_up_kernels
from fsdpx.nn.layer import list_kernels
from fsdpx.testing import LayerContract

__all__ = ["check_16_bits", "check_refusal", "contract_tests", "contracts_of", "ids", "rows"]

SHAPE = LayerContract()
rows, ids = SHAPE.draw_normal, SHAPE.draw_integers
REST = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def contracts_of(cases):
    """Return a class of tests for each case, by its name. cases: name -> a function that makes the layer, one that
    makes its inputs, and what its contract leaves out, as a dict."""
    found = {}
    for name, (make, inputs, *more) in cases.items():
        body = {"make": lambda self, f=make: f(), "inputs": lambda self, f=inputs: f()}
        for given in more:
            body |= given
        found[f"Test{name}"] = type(f"Test{name}", (LayerContract,), body)
    return found


def contract_tests(cases, package):
    """Return the tests of a package of layers, by name: the contract of each case, and that no layer is without one."""

    @pytest.mark.parametrize("name", cases)
    def test_no_kernel_is_compiled_in_a_step(name):
        check_kernels(cases, name)

    @pytest.mark.parametrize("name", cases)
    def test_the_text_of_a_layer_shows_every_argument(name):
        check_text(cases[name][0]())

    def test_every_layer_of_the_package_is_tested_here():
        assert layers_of(package) <= {type(make()) for make, *_ in cases.values()}

    of_each = test_no_kernel_is_compiled_in_a_step, test_the_text_of_a_layer_shows_every_argument
    tests = *of_each, test_every_layer_of_the_package_is_tested_here
    return contracts_of(cases) | {test.__name__: test for test in tests}


def layers_of(package):
    """Return the layers of `fsdpx.nn` whose files are in this package."""
    homes = homes_of("fsdpx.nn", Path(nn.__file__).read_text())
    found = {getattr(nn, name) for name, home in homes.items() if home.startswith(f"{package}.")}
    found = {one for one in found if isinstance(one, type) and issubclass(one, nn.Layer)}
    return found - {nn.Layer, nn.Container, nn.Composite}


def check_kernels(cases, name):
    """What a step of the layer calls is reached by warming what its `runs` name; numbers come before."""
    bodies = {body.__code__: kernel for kernel, body in choice.import_all_compiled_kernels().items()}
    layer = cases[name][0]()

    def reached(call):
        found = set()
        sys.setprofile(lambda frame, event, argument: found.add(bodies.get(frame.f_code)))
        try:
            call()
        finally:
            sys.setprofile(None)
        return found - {None, "normal"}

    step = contracts_of({name: cases[name]})[f"Test{name}"]().test_float32_stays_float32
    assert reached(step) <= reached(lambda: warm_up_kernels([*list_kernels(layer), "add"], np.float32))


def check_text(layer):
    """Ranks compare it, and so does a run that goes on: what it leaves out may differ unnoticed."""
    text, made = repr(layer), inspect.signature(type(layer).__init__).parameters.values()
    hidden = [p.name for p in made if p.kind not in REST and p.name != "self" and not hasattr(layer, p.name)]
    inside = all(f"{path}=" in text or hasattr(layer, path) for path in layer.children())
    assert not hidden or inside or isinstance(layer, nn.Sequential | nn.Graph)


def check_16_bits(layer, x, half, wide_gradients):
    """16-bit arrays stay 16-bit, come close to float64, and their gradients can be added in float32."""
    dtype = parse_dtype(half)
    p = parameters(layer)
    exact = gradients(layer, p)
    y, saved = layer.forward(env(), {n: a.copy() for n, a in p.items()}, x)
    dy = normal(*y.shape, seed=3)
    dx = layer.backward(env(), p, exact, saved, dy)
    p16 = {n: a.astype(dtype) for n, a in parameters(layer).items()}
    g = {n: a.astype(np.float32 if wide_gradients else dtype) for n, a in gradients(layer, p).items()}
    y16, saved = layer.forward(env(), p16, x.astype(dtype) if x.dtype.kind == "f" else x)
    dx16 = layer.backward(env(), p16, g, saved, dy.astype(dtype))
    assert y16.dtype == dtype
    limit = 0.02 if half == "float16" else 0.12
    close(y16, y, limit)
    if dx is not None:
        assert dx16.dtype == dtype
        close(dx16, dx, limit)
    for key, array in g.items():
        close(array, exact[key], limit)


def close(got, want, limit):
    """Largest error relative to the largest value."""
    error = np.max(np.abs(got.astype(np.float64) - want)) / max(1.0, np.max(np.abs(want)))
    assert error <= limit, error


def check_refusal(layer, theirs, x, training):
    """A batch that PyTorch's module refuses is refused, and no other one."""
    import torch

    def refuses(call):
        try:
            call()
        except ValueError:
            return True
        return False

    module = theirs.double().train(training)
    ours = refuses(lambda: layer.forward(env(training), parameters(layer), x))
    assert ours == refuses(lambda: module(torch.tensor(x)))
