"""What is rarely set is one value, `Machinery`; its fields may be given by name as well."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature

import numpy as np
import pytest

import fsdpx
from fsdpx import Machinery, nn, optim
from fsdpx.errors import ConfigError


def made(**options: object) -> fsdpx.Trainer:
    model = nn.Chain(*(nn.Linear(4, 4) for _ in range(3)))
    return model.as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), **options)


def test_a_value_and_its_fields_by_name_are_the_same_choice() -> None:
    few, many = made(), made(machinery=Machinery(group_bytes=0))
    assert len(few.inspect.placement.layout.units) == 1
    assert len(many.inspect.placement.layout.units) == len(made(group_bytes="0MiB").inspect.placement.layout.units) == 3
    both = made(machinery=Machinery(group_bytes=0, check_finite=True), group_bytes=1 << 20)
    assert len(both.inspect.placement.layout.units) == 1
    with pytest.raises(fsdpx.errors.NumericsError, match="input 'x'"):
        both.step(np.full((2, 4), np.nan, "f4"), np.zeros((2, 4), "f4"))


def test_what_is_no_machinery_is_named() -> None:
    with pytest.raises(ConfigError, match=r"machinery=\{'tune': False\}: say fsdpx.Machinery\(...\)"):
        made(machinery={"tune": False})
    with pytest.raises(ConfigError, match=r"distribute\(group_byte=...\): no such option; did you mean"):
        made(group_byte=0)
    with pytest.raises(ConfigError, match="ahead=-1: a number of pages"):
        Machinery(ahead=-1)


def test_a_call_has_few_parameters_and_each_choice_is_declared_once() -> None:
    named = [*signature(fsdpx.distribute).parameters]
    assert len(named) <= 23
    assert not set(named) & {field.name for field in fields(Machinery)}
