"""The optimisers against PyTorch and against the formulas of their papers."""

import numpy as np
import pytest

from fsdpx import optim
from fsdpx.optim import Segment, Segments
from fsdpx.optim.average import Averaged, average_of
from fsdpx.optim.kept import zeros
from fsdpx.testing.optimizer import OptimizerContract

SIZES = {"w": 300, "w.bias": 7, "norm.weight": 20}
N = sum(SIZES.values())


def places():
    at = 0
    for name, size in SIZES.items():
        yield name, slice(at, at + size)
        at += size


SEGMENTS = Segments(
    tuple(Segment(name, s.start, s.stop, 0, s.stop - s.start, (), "norm" in name) for name, s in places())
)


def gradients(steps=20):
    random = np.random.default_rng(11)
    return random.standard_normal(N), random.standard_normal((steps, N)) * 10 ** random.uniform(-3, 1, (steps, 1))


def trained(optimizer, p, gs):
    """The parameters after each step, and the averages."""
    p, found = p.copy(), []
    slots = zeros(np, optimizer, SEGMENTS, p.dtype)
    for step, g in enumerate(gs, 1):
        lr = optim.rate(optimizer, step)
        optimizer.update(np, p, g * 4.0, slots, lr=lr, step=step, segments=SEGMENTS, scale=0.25)
        name, factor = average_of(optimizer) or (None, 0.0)
        found.append((p.copy(), None if name is None else p + factor * slots[name]))
    return found


def of_matrix(optimizer, p, gs, shape):
    """One parameter of this shape after all steps."""
    segments = Segments((Segment("w", 0, p.size, 0, p.size, shape),))
    p, slots = p.copy(), zeros(np, optimizer, segments, p.dtype)
    for step, g in enumerate(gs, 1):
        optimizer.update(
            np, p, g * 4.0, slots, lr=optim.rate(optimizer, step), step=step, segments=segments, scale=0.25
        )
    return p


def ours(optimizer, p, gs):
    return trained(optimizer, p, gs)[-1][0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.01}),
        ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
        ("AdamW", {}),
        ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
    ],
)
def test_as_pytorch(name, options):
    torch = pytest.importorskip("torch")
    p, gs = gradients()
    theirs = torch.nn.Parameter(torch.tensor(p))
    optimizer = getattr(torch.optim, name)([theirs], **options)
    for g in gs:
        theirs.grad = torch.tensor(g)
        optimizer.step()
    assert np.allclose(ours(getattr(optim, name)(**options), p, gs), theirs.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_groups_as_pytorch():
    torch = pytest.importorskip("torch")
    p, gs = gradients()
    theirs = {name: torch.nn.Parameter(torch.tensor(p[at])) for name, at in places()}
    groups = [
        {"params": [theirs["w"]], "weight_decay": 0.5},
        {"params": [theirs["w.bias"], theirs["norm.weight"]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for g in gs:
        for name, at in places():
            theirs[name].grad = torch.tensor(g[at])
        optimizer.step()
    result = np.concatenate([t.detach().numpy() for t in theirs.values()])
    mine = ours(optim.AdamW(lr=0.01, weight_decay=0.5, groups=optim.no_decay), p, gs)
    assert np.allclose(mine, result, rtol=1e-12, atol=1e-12)


def test_warm_up_as_pytorch():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    of = torch.optim.lr_scheduler
    parts = [of.LinearLR(optimizer, 1 / 8, total_iters=7), of.CosineAnnealingLR(optimizer, 32)]
    schedule, theirs = of.SequentialLR(optimizer, parts, [8]), []
    for _ in range(40):
        theirs += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    mine = optim.schedules.WarmUp(8, optim.schedules.Cosine(0.1, 32))
    assert [mine(step) for step in range(1, 41)] == pytest.approx(theirs)
    assert mine(40) > 1e-4


def test_cosine_as_pytorch():
    torch = pytest.importorskip("torch")
    p, gs = gradients()
    theirs = torch.nn.Parameter(torch.tensor(p))
    optimizer = torch.optim.SGD([theirs], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20, 0.001)
    for g in gs:
        theirs.grad = torch.tensor(g)
        optimizer.step()
        schedule.step()
    mine = ours(optim.SGD(lr=optim.schedules.Cosine(0.1, 20, 0.001)), p, gs)
    assert np.allclose(mine, theirs.detach().numpy(), rtol=1e-12, atol=1e-12)


def lion(p, gs, lr, b1, b2, decay):
    """Algorithm 2 of Chen et al. 2023."""
    m = 0.0
    for g in gs:
        c = b1 * m + (1 - b1) * g
        p = p - lr * (np.sign(c) + decay * p)
        m = b2 * m + (1 - b2) * g
    return p


def test_lion_as_in_its_paper():
    p, gs = gradients()
    mine = ours(optim.Lion(lr=0.01, betas=(0.9, 0.99), weight_decay=0.3), p, gs)
    assert np.allclose(mine, lion(p, gs, 0.01, 0.9, 0.99, 0.3), rtol=1e-12, atol=1e-12)


def lamb(p, gs, lr, b1, b2, eps, decay):
    """Algorithm 2 of You et al. 2020 on one parameter, with phi(z) = z."""
    m = v = 0.0
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        r = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        u = r + decay * p
        p = p - lr * np.linalg.norm(p) / np.linalg.norm(u) * u
    return p


def test_lamb_as_in_its_paper():
    p, gs = gradients()
    mine = ours(optim.LAMB(lr=0.01, weight_decay=0.2), p, gs)
    theirs = np.concatenate([lamb(p[at], gs[:, at], 0.01, 0.9, 0.999, 1e-6, 0.2) for _, at in places()])
    assert np.allclose(mine, theirs, rtol=1e-11, atol=1e-12)


def test_lamb_steps_from_zero_with_a_ratio_of_one():
    p = ours(optim.LAMB(lr=0.01, eps=0.0, weight_decay=0.0), np.zeros(N), np.full((1, N), 3.0))
    assert np.allclose(p, -0.01)


class AnyCut(OptimizerContract):
    def make(self, **options):
        return optim.LAMB(**options)


def test_lamb_cut_anywhere_is_the_whole_to_rounding():
    whole, cut = AnyCut()._train("float64", []), AnyCut()._train("float64", [1, 133, 2000, 2503, 5001])
    for name in whole:
        assert np.allclose(whole[name], cut[name], rtol=1e-13, atol=1e-15), name


def schedule_free(p, gs, lr, b1, b2, eps, decay):
    """Algorithm 1 of Defazio et al. 2024: y and x after each step. lr: of each step, warm-up included."""
    x, z, v, total, found = p, p, 0.0, 0.0, []
    for t, g in enumerate(gs, 1):
        y = (1 - b1) * z + b1 * x
        v = b2 * v + (1 - b2) * g * g
        gamma = lr(t) * np.sqrt(1 - b2**t)
        z = z - gamma * g / (np.sqrt(v) + eps) - gamma * decay * y
        total += gamma**2
        c = gamma**2 / total
        x = (1 - c) * x + c * z
        found.append(((1 - b1) * z + b1 * x, x))
    return found


@pytest.mark.parametrize("lr", [optim.schedules.Constant(0.01), optim.schedules.WarmUp(5, 0.02)])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_schedule_free_as_in_its_paper(lr, decay):
    p, gs = gradients()
    optimizer = optim.AdamWScheduleFree(lr=lr, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay)
    pairs = zip(trained(optimizer, p, gs), schedule_free(p, gs, lr, 0.9, 0.99, 1e-6, decay), strict=True)
    for (y, x), (their_y, their_x) in pairs:
        assert np.allclose(y, their_y, rtol=1e-11, atol=1e-12)
        assert np.allclose(x, their_x, rtol=1e-11, atol=1e-12)


def test_schedule_free_resumes_anywhere():
    """The weights of the average are a function of the step: another instance goes on as if it had made all steps."""
    lr = optim.schedules.WarmUp(5, 0.02)
    made, fresh = optim.AdamWScheduleFree(lr=lr), optim.AdamWScheduleFree(lr=lr)
    assert [made._share(t) for t in range(1, 30)][-1] == fresh._share(29)
    assert optim.AdamWScheduleFree(lr=0.0)._share(3) == 1.0


def test_exponential_averages():
    p, gs = gradients()
    average = None  # begins with the parameters after the first step, as PyTorch's AveragedModel does
    for now, mine in trained(Averaged(optim.AdamW(lr=0.01), optim.EMA(0.8)), p, gs):
        average = now if average is None else 0.8 * average + 0.2 * now
        assert np.allclose(mine, average, rtol=1e-12, atol=1e-12)


def test_stochastic_weight_averages():
    p, gs = gradients()
    found, counted = trained(Averaged(optim.SGD(lr=0.01, momentum=0.9), optim.SWA(start=4, every=3)), p, gs), []
    for step, (now, mine) in enumerate(found, 1):
        counted += [now] if step in (4, 7, 10, 13, 16, 19) else []
        assert np.allclose(mine, np.mean(counted, axis=0) if counted else now, rtol=1e-12, atol=1e-12), step


def test_an_average_leaves_the_training_alone():
    p, gs = gradients()
    plain, averaged = (ours(o, p, gs) for o in (optim.AdamW(), Averaged(optim.AdamW(), optim.EMA())))
    assert np.array_equal(plain, averaged)


def muon(p, gs, shape, lr, mu, decay):
    """Jordan et al. 2024 with the factor of Liu et al. 2025 (equation 4). Singular values by decomposition: each goes
    through the polynomial five times."""
    m = np.zeros(shape)
    p = p.reshape(shape)
    for g in gs.reshape(-1, *shape):
        m = mu * m + g
        u, s, v = np.linalg.svd(g + mu * m, full_matrices=False)
        s /= np.linalg.norm(s) + 1e-7
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        p = p - lr * (0.2 * np.sqrt(max(shape)) * (u * s) @ v + decay * p)
    return p.reshape(-1)


@pytest.mark.parametrize("shape", [(15, 20), (30, 10), (300, 1)])
def test_muon_as_in_its_papers(shape):
    p, gs = gradients()
    segments = Segments((Segment("w", 0, 300, 0, 300, shape), *SEGMENTS.items[1:]))
    optimizer = optim.Muon(lr=0.01, weight_decay=0.1, momentum=0.9)
    mine, slots = p.copy(), {name: np.zeros(N) for name in optimizer.slots}
    for step, g in enumerate(gs, 1):
        optimizer.update(np, mine, g * 4.0, slots, lr=0.01, step=step, segments=segments, scale=0.25)
    assert np.allclose(mine[:300], muon(p[:300], gs[:, :300], shape, 0.01, 0.9, 0.1), rtol=1e-8, atol=1e-9)
    assert np.array_equal(mine[300:], ours(optim.AdamW(lr=0.01, weight_decay=0.1), p, gs)[300:])
    assert not slots["v"][:300].any()


def test_muon_leaves_matrices_of_some_names_to_the_other():
    p, gs = gradients()
    embed = Segments((Segment("embed.weight", 0, N, 0, N, (N, 1)),))
    found = []
    for optimizer in (optim.Muon(lr=0.01), optim.AdamW(lr=0.01)):
        mine, slots = p.copy(), {name: np.zeros(N) for name in optimizer.slots}
        optimizer.update(np, mine, gs[0], slots, lr=0.01, step=1, segments=embed)
        found.append(mine)
    assert np.array_equal(*found)


def dynamic(signed):
    """The numbers of figure 2 and appendix of Dettmers et al. 2022: a sign, zeros that are the exponent of 10, a bit
    that ends them, and linear digits from 0.1 to 1."""
    found = {0.0, 1.0}
    for zeros_before in range(7):
        digits = (6 if signed else 7) - zeros_before
        edges = np.linspace(0.1, 1.0, 2**digits + 1)
        values = (edges[1:] + edges[:-1]) / 2 / 10**zeros_before
        found |= {*values, *(-values if signed else ())}
    return np.array(sorted(found))


def rounded(x, numbers, block):
    """Each element as the nearest number times the largest of its block."""
    found = []
    for at in range(0, x.size, block):
        part = x[at : at + block]
        top = np.float64(np.float32(np.abs(part).max()))
        found.append(numbers[np.abs(part[:, None] / top - numbers).argmin(axis=1)] * top)
    return np.concatenate(found)


def adamw_8bit(p, gs, lr, b1, b2, eps, decay, block):
    """Dettmers et al. 2022: moments are widened, updated, used, and rounded again. A v above 0 stays above 0."""
    m = v = np.zeros(p.size)
    unsigned = dynamic(False)
    for t, g in enumerate(gs, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p * (1 - lr * decay) - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        small, m, v = v, rounded(m, dynamic(True), block), rounded(v, unsigned, block)
        for at in range(0, v.size, block):
            part = slice(at, at + block)
            v[part] = np.where((v[part] == 0) & (small[part] > 0), unsigned[1] * small[part].max(), v[part])
    return p


def test_adamw_in_8_bits_as_in_its_paper():
    """Tables are float32 here and float64 there; few elements are so near to an edge that it shows."""
    p, gs = gradients()
    gs = gs * 10.0 ** np.random.default_rng(1).uniform(-5, 0, gs.shape)
    assert len(dynamic(True)) == len(dynamic(False)) == 256
    optimizer = optim.AdamW8bit(lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, block=16)
    mine = ours(optimizer, p, gs)
    theirs = np.concatenate([adamw_8bit(p[at], gs[:, at], 0.01, 0.9, 0.99, 1e-6, 0.1, 16) for _, at in places()])
    assert np.allclose(mine, theirs, rtol=1e-6, atol=1e-8)
    exact = ours(optim.AdamW(lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1), p, gs)
    assert 1e-5 < np.abs(mine - exact).max() < 0.1


@pytest.mark.parametrize("shape", [(15, 20), (300,), (300, 1), (1, 300)])
def test_adafactor_as_pytorch(shape):
    torch = pytest.importorskip("torch")
    p, gs = gradients()
    options = {"lr": 0.05, "weight_decay": 0.1, "eps": (1e-30, 1e-3), "d": 1.0, "beta2_decay": -0.7}
    theirs = torch.nn.Parameter(torch.tensor(p[:300].reshape(shape)))
    optimizer = torch.optim.Adafactor([theirs], **options)
    for g in gs:
        theirs.grad = torch.tensor(g[:300].reshape(shape))
        optimizer.step()
    mine = of_matrix(optim.Adafactor(**options), p[:300], gs[:, :300], shape)
    assert np.allclose(mine, theirs.detach().numpy().reshape(-1), rtol=1e-11, atol=1e-12)


def adafactor(p, gs, lr, eps1, eps2, d, power):
    """Algorithms 4 and 6 of Shazeer & Stern 2018, with sums of rows and of columns. p: a matrix."""
    r, c = np.zeros((len(p), 1)), np.zeros((1, p.shape[1]))
    for t, g in enumerate(gs.reshape(-1, *p.shape), 1):
        alpha, beta = max(eps2, np.sqrt(np.mean(p**2))) * min(lr, 1 / np.sqrt(t)), 1 - t**power
        r = beta * r + (1 - beta) * (g**2 + eps1).sum(axis=1, keepdims=True)
        c = beta * c + (1 - beta) * (g**2 + eps1).sum(axis=0, keepdims=True)
        u = g / np.sqrt(r @ c / r.sum())
        p = p - alpha * u / max(1, np.sqrt(np.mean(u**2)) / d)
    return p.reshape(-1)


@pytest.mark.parametrize("shape", [(15, 20), (30, 10)])
def test_adafactor_as_in_its_paper(shape):
    p, gs = gradients()
    mine = of_matrix(optim.Adafactor(lr=0.05, d=0.7), p[:300], gs[:, :300], shape)
    theirs = adafactor(p[:300].reshape(shape), gs[:, :300], 0.05, 1e-30, 1e-3, 0.7, -0.8)
    assert np.allclose(mine, theirs, rtol=1e-11, atol=1e-12)


def soap(p, gs, lr, b1, b2, eps, decay, every):
    """Algorithm 3 and 4 of Vyas et al. 2024 on one block; the first gradient only makes the bases."""
    g = gs[0].reshape(p.shape)
    left, r = (1 - b2) * g @ g.T, (1 - b2) * g.T @ g
    q, o = np.linalg.eigh(left)[1], np.linalg.eigh(r)[1]
    m = v = np.zeros(p.shape)
    for t, g in enumerate(gs[1:].reshape(-1, *p.shape), 2):
        turned = q.T @ g @ o
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * turned**2
        n = (q.T @ m @ o) / (1 - b1 ** (t - 1)) / (np.sqrt(v / (1 - b2 ** (t - 1))) + eps)
        p = p - lr * q @ n @ o.T - lr * decay * p
        left, r = b2 * left + (1 - b2) * g @ g.T, b2 * r + (1 - b2) * g.T @ g
        if t % every == 0:
            q, o = np.linalg.qr(left @ q)[0], np.linalg.qr(r @ o)[0]
    return p


@pytest.mark.parametrize("block", [32, 8])
def test_soap_as_in_its_paper(block):
    """Of square blocks: their gradients leave no null space, of which any basis is an eigenbasis."""
    p, gs = gradients()
    gs /= np.abs(gs).max(axis=1, keepdims=True)
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.1, "every": 3}
    mine = of_matrix(optim.SOAP(**options, block=block), p[:256], gs[:, :256], (16, 16)).reshape(16, 16)
    for rows in (slice(a, a + block) for a in range(0, 16, block)):
        for columns in (slice(a, a + block) for a in range(0, 16, block)):
            part = gs[:, :256].reshape(-1, 16, 16)[:, rows, columns]
            whole = p[:256].reshape(16, 16)[rows, columns]
            theirs = soap(whole, part.reshape(len(gs), -1), 0.01, 0.9, 0.95, 1e-12, 0.1, 3)
            assert np.allclose(mine[rows, columns], theirs, rtol=1e-6, atol=1e-8)
