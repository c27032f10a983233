"""Options, schedules and groups of optimizers, and the contract that all of them keep."""

import math

import numpy as np
import pytest
from amount import examples
from bits import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import mode as mode
from present import needs

import fsdpx
from fsdpx import optim
from fsdpx.core.array.sums import EXPANSION_PARTS, compute_padded_sum_expansion, compute_sum_expansion
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.optim import HyperparameterSpan, ShardSegment, ShardSegments, schedules
from fsdpx.optim.average import AveragedOptimizer
from fsdpx.optim.optimizer import require_valid_betas
from fsdpx.testing.optimizer import OptimizerContract


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: optim.SGD(lr=-1), r"SGD\(lr=-1\): a finite number >= 0 is needed"),
        (lambda: optim.SGD(lr="1"), r"SGD\(lr='1'\): a finite number"),
        (lambda: optim.SGD(lr=True), r"SGD\(lr=True\): a finite number"),
        (lambda: optim.SGD(momentum=1.0), r"SGD\(momentum=1.0\): a finite number >= 0 and < 1 is needed"),
        (lambda: optim.SGD(nesterov=True), r"SGD\(nesterov=True\) needs a momentum above 0"),
        (lambda: optim.Adam(eps=math.nan), r"Adam\(eps=nan\): a finite number"),
        (lambda: optim.AdamW(betas=0.9), r"AdamW\(betas=0.9\): a pair of numbers is needed, like \(0.9, 0.999\)"),
        (lambda: require_valid_betas(optim.SGD(), (0.9, 0.99), 3), r"SGD\(betas=\(0.9, 0.99\)\): 3 numbers are needed"),
        (lambda: optim.AdamW(betas=(0.9, 1)), r"AdamW\(betas\[1\]=1\): a finite number >= 0 and < 1"),
        (lambda: optim.AdamW(weight_decay=-0.1), r"AdamW\(weight_decay=-0.1\)"),
        (lambda: optim.Lion(betas=(-0.1, 0.9)), r"Lion\(betas\[0\]=-0.1\)"),
        (lambda: optim.Muon(exclude=[3]), r"Muon: exclude=\[3\]: a list of name patterns is needed"),
        (lambda: optim.Muon(exclude="h*"), r"Muon\(exclude='h\*'\): a list of name patterns is needed, \['h\*'\]"),
        (lambda: optim.Muon(others=optim.LAMB()), r"Muon\(others=LAMB\(.*\): an optimizer with a slot m is needed"),
        (lambda: optim.Muon(others=optim.SGD()), r"Muon\(others=SGD\(.*\): an optimizer with a slot m is needed"),
        (lambda: optim.EMA(1.0), r"EMA\(decay=1.0\): a finite number >= 0 and < 1 is needed"),
        (lambda: optim.SWA(start=0), r"SWA\(start=0\): a whole number of steps, 1 or more, is needed"),
        (lambda: optim.SWA(every=True), r"SWA\(every=True\): a whole number of steps"),
        (lambda: AveragedOptimizer(optim.SGD(), 0.99), r"average=0.99: fsdpx.EMA\(...\) or fsdpx.SWA\(...\) is needed"),
        (lambda: AveragedOptimizer(optim.SGD(), optim.EMA), r"average=<class .*EMA'>: fsdpx.EMA\(...\) or"),
        (lambda: AveragedOptimizer(AveragedOptimizer(optim.AdamW(), optim.SWA()), optim.EMA()),
         r"average=EMA\(decay=0.999\): AveragedOptimizer keeps an average itself; leave it out"),
        (lambda: optim.LAMB(eps=-1.0), r"LAMB\(eps=-1.0\)"),
        (lambda: optim.AdamW(groups=["*"]), r"AdamW\(groups=\['\*'\]\): a dict from name pattern to overrides"),
        (lambda: optim.AdamW(groups={"*": 0.1}), r"AdamW: group '\*': 0.1 is no name pattern with a dict"),
        (lambda: optim.AdamW(groups={"*": {"beta": 0}}), r"group '\*' sets 'beta'; a group can set lr_scale and wei"),
        (lambda: optim.AdamW(groups={"b": {"lr_scale": -2}}), r"AdamW\(groups\['b'\]\['lr_scale'\]=-2\)"),
        (lambda: schedules.Constant(-1), r"Constant\(lr=-1\)"),
        (lambda: schedules.Cosine(0.1, 0), r"Cosine\(steps=0\): a whole number of steps, 1 or more, is needed"),
        (lambda: schedules.Linear(0.1, 1.5), r"Linear\(steps=1.5\): a whole number of steps"),
        (lambda: schedules.Step(0.1, 0), r"Step\(every=0\): a whole number of steps"),
        (lambda: schedules.InverseSquareRoot(0.1, -1), r"InverseSquareRoot\(steps=-1\)"),
        (lambda: schedules.WarmUp(0, 0.1), r"WarmUp\(steps=0\)"),
        (lambda: schedules.WarmUp(1, "x"), r"WarmUp\(schedule='x'\): a finite number"),
        (lambda: schedules.Cosine(0.1, 9)(0), r"Cosine\(lr=0.1, .*: there is no step 0; pass the number of the update"),
        (lambda: schedules.WarmUp(2, 0.1)(-1), r"WarmUp\(.*: there is no step -1"),
        (lambda: optim.SGD([np.ones(3)], 0.1), r"SGD\(parameters, ...\): leave out the parameters"),
        (lambda: optim.AdamW(iter([np.ones(3)]), lr=0.1), r"AdamW\(parameters, ...\): .*: the trainer passes them"),
        (lambda: optim.AdamW(learning_rate=1e-3), r"AdamW\(learning_rate=...\): no such option; here that is lr="),
        (lambda: optim.SGD(momentun=0.9), r"SGD\(momentun=...\): no such option; did you mean 'momentum'\?"),
        (lambda: schedules.Cosine(1e-3, steps_=3), r"Cosine\(steps_=...\): no such option; did you mean 'steps'\?"),
        (lambda: schedules.Cosine(1e-3, T_max=3), r"Cosine\(T_max=...\): no such option; here that is steps="),
        (lambda: optim.EMA(qqq=1), r"EMA\(qqq=...\): no such option: decay"),
        (lambda: ShardSegments((ShardSegment("a", 1, 2, 0, 1),)), "the first segment 'a' starts at 1, not at 0"),
        (lambda: ShardSegments((ShardSegment("a", 0, 2, 0, 2), ShardSegment("b", 3, 4, 0, 1))),
         "segment 'b' starts at 3, but 'a' before it ends at 2"),
        (lambda: ShardSegment("a", 0, 5, 2, 6), "is not inside its shard and its parameter"),
    ],
)  # fmt: skip
def test_bad_options_and_segments(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_a_schedule_that_gives_no_rate_is_named_with_its_step():
    with pytest.raises(ConfigError, match="the learning rate of step 3 is nan"):
        optim.get_learning_rate(optim.SGD(lr=lambda step: math.nan), 3)
    assert optim.get_learning_rate(optim.SGD(lr=0.25), 7) == 0.25


def test_arrays_that_do_not_fit():
    held, p = ShardSegments((ShardSegment("w", 0, 4, 0, 4),)), np.zeros(4)
    with pytest.raises(ConfigError, match=r"AdamW: needs the slots \['m', 'v'\], got \['m'\]"):
        optim.AdamW().update(np, p, p, {"m": p}, lr=0.1, step=1, segments=held)
    with pytest.raises(ShapeError, match=r"SGD: g has shape \(3,\), but its segments hold \(4,\) elements"):
        optim.SGD().update(np, p, np.zeros(3), {}, lr=0.1, step=1, segments=held)
    with pytest.raises(ConfigError, match="SGD: step 0 is below 1, the first"):
        optim.SGD().update(np, p, p, {}, lr=0.1, step=0, segments=held)


def test_schedules_by_value():
    def rates(schedule, steps):
        return [schedule(step) for step in steps]

    assert rates(schedules.Constant(0.5), (1, 100)) == [0.5, 0.5]
    assert rates(schedules.Linear(1.0, 4), (1, 2, 3, 5, 9)) == [1.0, 0.75, 0.5, 0.0, 0.0]
    assert rates(schedules.Cosine(1.0, 10, 0.5), (1, 6, 11, 99)) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert rates(schedules.Step(1.0, 3, 0.5), (1, 3, 4, 6, 7)) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert rates(schedules.InverseSquareRoot(1.0, 4), (1, 13)) == [1.0, 0.5]


def test_warm_up_leads_into_its_decay():
    noam = schedules.WarmUp(4, schedules.InverseSquareRoot(0.3, 4))
    want = [0.3 * min(t / 4, math.sqrt(4 / max(t - 1, 4))) for t in range(1, 40)]
    assert [noam(t) for t in range(1, 40)] == pytest.approx(want)
    cosine = schedules.WarmUp(10, schedules.Cosine(1.0, 90))
    assert [cosine(t) for t in (1, 5, 10, 11, 101, 1000)] == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.0, 0.0])
    assert cosine(9) < cosine(10) == cosine(11) > cosine(12) > cosine(100) > 1e-4
    assert [schedules.WarmUp(2, 0.5)(t) for t in (1, 2, 3)] == [0.25, 0.5, 0.5]


def test_all_are_values():
    assert optim.AdamW() == optim.AdamW(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    assert schedules.WarmUp(3, schedules.Cosine(0.1, 9)) == schedules.WarmUp(3, schedules.Cosine(0.1, 9))
    with pytest.raises(AttributeError):
        optim.AdamW().lr = 3


NUMBERS = {
    "whole": (np.int64, np.uint8, lambda n: np.array(n, np.int32)),
    "real": (np.float32, np.float64, np.float16, np.array),
    "truth": (np.bool_,),
}
TABLE = [
    (optim.SGD, {"lr": 0.5, "momentum": 0.25, "weight_decay": 0.125, "nesterov": True}),
    (optim.AdamW, {"lr": 0.5, "betas": (0.5, 0.25), "eps": 0.125, "groups": {"a": {"lr_scale": 0.5}}}),
    (optim.Lion, {"lr": 0.5, "betas": (0.5, 0.25)}),
    (optim.LAMB, {"lr": 0.5, "weight_decay": 0.5}),
    (optim.Muon, {"lr": 0.5, "momentum": 0.5}),
    (schedules.Cosine, {"lr": 0.5, "steps": 7, "final": 0.25}),
    (schedules.Step, {"lr": 0.5, "every": 7, "factor": 0.25}),
    (schedules.WarmUp, {"steps": 7, "schedule": 0.5}),
    (optim.EMA, {"decay": 0.5}),
    (optim.SWA, {"start": 3, "every": 2}),
    (fsdpx.Sharding, {"replica": 2, "shard": 3, "prefetch": 2}),
    (fsdpx.Precision, {"loss_scale": 4.0, "initial_scale": 8.0, "growth_interval": 5}),
    (fsdpx.Mesh, {"shard": 2, "tensor": 3}),
    pytest.param("AsyncSGD", {"staleness": 3, "by_staleness": True}, marks=needs("asynchronous")),
    pytest.param("LocalSGD", {"sync_every": 3, "delay": 1, "mix": 0.5}, marks=needs("asynchronous")),
]


@pytest.mark.parametrize(("make", "options"), TABLE, ids=lambda value: getattr(value, "__name__", ""))
def test_numbers_of_numpy_are_numbers(make, options):
    def as_numpy(value, turn):
        if isinstance(value, tuple):
            return tuple(as_numpy(one, turn) for one in value)
        if isinstance(value, dict):
            return {name: as_numpy(one, turn) for name, one in value.items()}
        kinds = NUMBERS["truth" if isinstance(value, bool) else "whole" if isinstance(value, int) else "real"]
        return kinds[turn % len(kinds)](value)

    make = getattr(fsdpx, make) if isinstance(make, str) else make
    for turn in range(4):
        made = make(**{name: as_numpy(value, turn) for name, value in options.items()})
        assert repr(made) == repr(make(**options))
        assert made == make(**options)
    assert optim.get_learning_rate(optim.SGD(lr=lambda step: np.float32(0.5)), 1) == 0.5


def test_numbers_of_numpy_are_options_of_distribute_and_fit():
    options = {"microbatches": 2, "seed": 3, "clip_norm": 0.5, "group_bytes": 64, "check_finite": True, "tune": False}
    kinds = {int: np.int64, float: np.float32, bool: np.bool_}

    def trained(wrap):
        given = {name: wrap(value) for name, value in options.items()}
        trainer = fsdpx.nn.Linear(3, 2).as_distributed(loss=fsdpx.nn.MSELoss(), optimizer=optim.SGD(lr=0.5), **given)
        trainer.fit([(np.ones((4, 3)), np.ones((4, 2)))] * 4, epochs=wrap(1), steps=wrap(3))
        return trainer.global_step, bits(trainer)

    assert trained(lambda value: kinds[type(value)](value)) == trained(lambda value: value)


def segments(*names, exchange=None):
    items = (ShardSegment(n, 10 * i, 10 * i + 10, 0, 10, norm="norm" in n) for i, n in enumerate(names))
    return ShardSegments(tuple(items), exchange)


def test_neighbors_with_equal_hyperparameters_are_one_run():
    held = segments("0.weight", "1.weight", "1.bias", "norm.weight", "2.weight")
    assert held.hyperparameter_spans({}) == (HyperparameterSpan(0, 50),)
    assert held.hyperparameter_spans(optim.no_decay) == (
        HyperparameterSpan(0, 20),
        HyperparameterSpan(20, 40, weight_decay=0.0),
        HyperparameterSpan(40, 50),
    )
    assert ShardSegments(()).hyperparameter_spans(optim.no_decay) == ()


def test_the_first_pattern_that_matches_wins():
    groups = {"*.weight": {"lr_scale": 2.0}, "1.*": {"lr_scale": 3.0, "weight_decay": 0.5}}
    runs = segments("1.weight", "1.bias").hyperparameter_spans(groups)
    assert runs == (HyperparameterSpan(0, 10, lr_scale=2.0), HyperparameterSpan(10, 20, lr_scale=3.0, weight_decay=0.5))


@pytest.mark.parametrize(
    ("name", "norm", "decays"),
    [("bn1.scale", True, False), ("0.bias", False, False), ("bias", False, False), ("normal.weight", False, True)],
)
def test_no_decay_knows_norms_by_what_they_are(name, norm, decays):
    held = ShardSegments((ShardSegment(name, 0, 10, 0, 10, norm=norm),))
    for part in (held, held.split_into_blocks(4)[1][1]):
        (run,) = part.hyperparameter_spans(optim.no_decay)
        assert run.get_weight_decay(0.1) == (0.1 if decays else 0.0)


def test_sums_go_over_all_shards_of_a_parameter():
    def exchange(mine, width):
        theirs = {
            "b": [*compute_padded_sum_expansion([5.0]), *compute_padded_sum_expansion([50.0])],
            "c": [*compute_padded_sum_expansion([7.0]), *compute_padded_sum_expansion([70.0])],
        }
        assert all(len(row) == width for row in (*mine.values(), *theirs.values()))
        return {name: [rows[name] for rows in (mine, theirs) if name in rows] for name in "abc"}

    held = segments("a", "b", exchange=exchange)
    assert held.all_reduce_square_sums([[1.0, 2.0], [3.0]], [[10.0], [20.0]]) == ([3.0, 8.0], [10.0, 70.0])


def test_an_empty_shard_takes_part_in_the_exchange():
    exchanged = []
    assert ShardSegments((), lambda *told: exchanged.append(told) or {}).all_reduce_square_sums([], []) == ([], [])
    assert exchanged == [({}, 2 * EXPANSION_PARTS)]


@settings(derandomize=True, database=None, deadline=None, max_examples=examples(60))
@given(values=st.lists(st.floats(0, 1e300), max_size=40), cut=st.integers(0, 40))
def test_sums_do_not_see_the_shards(values, cut):
    assert math.fsum([*compute_sum_expansion(values[:cut]), *compute_sum_expansion(values[cut:])]) == math.fsum(values)


def test_sums_that_are_not_finite_stay_so():
    assert compute_sum_expansion([1.0, math.inf]) == [math.inf]
    assert compute_sum_expansion([1e308, 1e308, 1e308]) == [math.inf]
    assert np.isnan(compute_sum_expansion([math.nan, 1.0])).all()
    assert segments("a").all_reduce_square_sums([[1e308, 1e308]]) == ([math.inf],)


KINDS = {
    **{kind.__name__: (kind, {}) for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Lion, optim.Muon)},
    "Momentum": (lambda **options: optim.SGD(momentum=0.9, **options), {}),
    "Nesterov": (lambda **options: optim.SGD(momentum=0.9, nesterov=True, **options), {}),
    "EMA": (lambda **options: AveragedOptimizer(optim.AdamW(**options), optim.EMA(0.9)), {}),
    "SWA": (lambda **options: AveragedOptimizer(optim.SGD(**options), optim.SWA(start=2)), {}),
    "LAMB": (optim.LAMB, {"shard_alignment": 1024}),
}
BOTH = pytest.mark.usefixtures("mode")
for _name, (_make, _more) in KINDS.items():
    _body = {"make": lambda self, make=_make, **options: make(**options), "pytestmark": BOTH, **_more}
    globals()[f"Test{_name}"] = type(f"Test{_name}", (OptimizerContract,), _body)
