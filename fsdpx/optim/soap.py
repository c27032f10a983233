"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024), in blocks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdpx.errors import ConfigError
from fsdpx.optim.adam import AdamW
from fsdpx.optim.elementwise import Elementwise
from fsdpx.optim.factored import matrix
from fsdpx.optim.kept import Kept
from fsdpx.optim.matrices import BUT, Matrices
from fsdpx.optim.optimizer import Rate, Slots
from fsdpx.optim.segments import Groups, Run, Segment

__all__ = ["SOAP"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SOAP(Matrices):
    """For each block G of a matrix's gradient: L, R = running means of G G' and G' G, whose eigenvectors are Q, P;
    m = mean of G; v = mean of (Q' G P)^2; p -= lr Q (Q' m P / (sqrt(v) + eps)) P', with bias-corrected m and v
    (Vyas et al. 2024, Algorithm 3). Q and P begin with the eigenvectors of the first L and R, when matrices are not
    updated yet; after every `every` steps each is recomputed by one step of the power method and a QR decomposition.

    Parameters of one dim, and those whose names match `but`, are updated by `AdamW` with the same options. Kernels of
    convolutions count as matrices of as many rows as channels go out. Matrices are gathered: every rank that has a part
    of one sends its gradient and moments, and computes all of its update, so the bits do not depend on the cut. The
    tensor axis must have one rank.

    Slots: m, v; and left, right, left_basis, right_basis, which every rank keeps whole that has a part of a matrix: in
    all 4 numbers for each element of a square block.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number, of all parameters
    betas : decay of m, and of v, L and R, per step, each in [0, 1)
    eps : added to the square root
    weight_decay : share of p that is taken off per step, times lr
    every : steps from one update of the eigenvectors to the next, 1 or more
    block : largest number of rows and columns of a block, 1 or more
    but : name patterns (fnmatch) of matrices for AdamW
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 3e-3
    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    every: int = 10
    block: int = 256
    but: Sequence[str] = BUT
    groups: Groups = field(default_factory=dict)
    arrays: ClassVar[int] = 3
    slots: ClassVar[tuple[str, ...]] = ("m", "v", "left", "right", "left_basis", "right_basis")  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("every", "block"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"SOAP({name}={value!r}): a whole number, 1 or more, is needed")

    @property
    def kept(self) -> Mapping[str, Kept]:
        left, right = Kept(shape=self._left), Kept(shape=self._right)
        return {"left": left, "left_basis": left, "right": right, "right_basis": right}

    def _left(self, name: str, shape: Shape) -> Shape:
        return (sum(rows**2 for (rows, _), _ in self._blocks(shape)) if self.is_matrix(name, shape) else 0,)

    def _right(self, name: str, shape: Shape) -> Shape:
        return (sum(columns**2 for (_, columns), _ in self._blocks(shape)) if self.is_matrix(name, shape) else 0,)

    def _blocks(self, shape: Shape) -> Iterator[tuple[Shape, tuple[slice, slice]]]:
        """The shape of each block, and where it is."""
        rows, columns = ([slice(a, min(a + self.block, n)) for a in range(0, n, self.block)] for n in matrix(shape))
        yield from (((r.stop - r.start, c.stop - c.start), (r, c)) for r in rows for c in columns)

    def _other(self) -> Elementwise:
        return AdamW(betas=self.betas, eps=self.eps)

    def _part(self, xp: Any, g: Any, slots: Slots, scale: float) -> Any:
        m, v = slots["m"], slots["v"]
        scaled = g.astype(m.dtype) * m.dtype.type(scale)
        return xp.stack([scaled, m, v])

    def _follow(self, xp: Any, p: Any, full: Any, slots: Slots, s: Segment, run: Run, lr: float, step: int) -> None:
        g, m, v = (array.reshape(matrix(s.shape)) for array in full)
        new, number, at = xp.zeros_like(g), p.dtype.type, [0, 0]
        if not slots["left_basis"].any():
            lr = 0.0
        correction = (1.0 - self.betas[1] ** max(step - 1, 1)) ** 0.5 / (1.0 - self.betas[0] ** max(step - 1, 1))
        for (rows, columns), where in self._blocks(s.shape):
            sides = []
            for i, (side, n) in enumerate((("left", rows), ("right", columns))):
                sides += [slots[name][at[i] : at[i] + n * n].reshape(n, n) for name in (side, f"{side}_basis")]
                at[i] += n * n
            new[where] = self._block(xp, g[where], m[where], v[where], sides, step)
        own = slice(s.offset, s.offset + p.size)
        p *= number(1.0 - lr * run.decay(self.weight_decay))
        p -= new.reshape(-1)[own] * number(lr * correction)
        slots["m"][...], slots["v"][...] = m.reshape(-1)[own], v.reshape(-1)[own]

    def _block(self, xp: Any, g: Any, m: Any, v: Any, sides: list[Any], step: int) -> Any:
        """The direction; moves m, v, and what is kept for the two sides."""
        left, q, right, p = sides
        number, (beta1, beta2) = g.dtype.type, self.betas
        first, direction = not q.any(), xp.zeros_like(g)
        if not first:
            turned = q.T @ g @ p
            m += (g - m) * number(1.0 - beta1)
            v *= number(beta2)
            v += turned * turned * number(1.0 - beta2)
            direction = q @ ((q.T @ m @ p) / (xp.sqrt(v) + number(self.eps))) @ p.T
        for kept, basis, square in ((left, q, g @ g.T), (right, p, g.T @ g)):
            kept += (square - kept) * number(1.0 - beta2)
            if first:
                basis[...] = xp.linalg.eigh(kept)[1]
            elif step % self.every == 0:
                basis[...] = xp.linalg.qr(kept @ basis)[0]
        return direction
