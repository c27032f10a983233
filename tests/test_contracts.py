"""All checks of a contract run in few tests, and each that fails is named."""

from typing import Any

import pytest
from contracts import is_contract, merge_checks

from fsdpx.testing import LayerContract
from fsdpx.testing.communicator import ALL_DTYPES, CommunicatorContract


class Contract:
    """Not one of `fsdpx.testing`."""

    seen: list[Any]

    def test_first(self) -> None:
        self.seen.append("first")
        raise AssertionError("first")

    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    @pytest.mark.parametrize(("n", "m"), [(1, 2), (3, 4)])
    def test_second(self, dtype: str, n: int, m: int) -> None:
        self.seen.append((dtype, n, m))
        if dtype == "int8":
            pytest.fail(f"{n}")

    def test_third(self) -> None:
        self.seen.append("third")

    def test_with_a_fixture(self, tmp_path: Any) -> None:
        raise AssertionError("not among them")


def test_every_check_runs_once_and_each_that_fails_is_named() -> None:
    one: Any = merge_checks(Contract)()
    one.seen = []
    with pytest.raises(AssertionError, match="first") as found:
        one.test_contract()
    assert found.value.__notes__ == ["in Contract.test_first()"]
    one.test_contract_with("float32")
    with pytest.raises(BaseExceptionGroup, match="2 of 2 checks failed") as several:
        one.test_contract_with("int8")
    notes = [note for error in several.value.exceptions for note in error.__notes__]
    assert notes == ["in Contract.test_second(n=1, m=2, dtype=int8)", "in Contract.test_second(n=3, m=4, dtype=int8)"]
    assert one.seen == ["first", "third", *((dtype, *n) for dtype in ("float32", "int8") for n in ((1, 2), (3, 4)))]
    assert (one.test_second, one.test_with_a_fixture.__func__) == (None, Contract.test_with_a_fixture)


def test_contracts_of_the_package_are_merged_as_a_whole() -> None:
    for kind in (LayerContract, CommunicatorContract):
        assert is_contract(kind)
        merged = merge_checks(kind)
        tests = [name for name in dir(merged) if name.startswith("test") and getattr(merged, name) is not None]
        assert tests == ["test_contract", "test_contract_with"][: 1 + (kind is CommunicatorContract)]
    (dtypes,) = merged.test_contract_with.pytestmark
    assert set(dtypes.args[1]) == set(ALL_DTYPES)
    assert not is_contract(Contract)
