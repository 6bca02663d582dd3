"""What every patch of another library promises: once, undone to what was there, or an error."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fused_grpo.integrations.patching import Patch, check_version, holders


class Owner:
    """A class whose attributes are replaced in place; the first is a static method."""

    @staticmethod
    def method() -> str:
        return "theirs"


def test_modules_and_classes_get_back_what_they_had() -> None:
    module = SimpleNamespace(value=1)
    patch = Patch("it", lambda: [(module, "value", 2), (Owner, "method", lambda self: "ours")])
    before = vars(Owner)["method"]
    with patch.apply():
        assert patch.applied
        assert module.value == 2
        assert Owner().method() == "ours"
    assert not patch.applied
    assert module.value == 1
    assert vars(Owner)["method"] is before
    assert Owner.method() == "theirs"


def test_it_can_be_applied_again_after_it_was_undone() -> None:
    module = SimpleNamespace(value=1)
    patch = Patch("it", lambda: [(module, "value", 2)])
    for _ in range(2):
        patch.apply()
        with pytest.raises(RuntimeError, match="it is patched already"):
            patch.apply()
        patch.undo()
        with pytest.raises(RuntimeError, match="it is not patched"):
            patch.undo()


def test_an_error_on_the_way_leaves_nothing_replaced() -> None:
    """Of two attributes the second cannot be set."""
    module = SimpleNamespace(value=1)
    patch = Patch("it", lambda: [(module, "value", 2), (object(), "value", 2)])
    with pytest.raises(AttributeError):
        patch.apply()
    assert module.value == 1
    assert not patch.applied


def test_nothing_to_replace_raises() -> None:
    with pytest.raises(RuntimeError, match="it: found nothing to replace"):
        Patch("it", list).apply()


def test_somebody_else_in_the_same_place() -> None:
    module = SimpleNamespace(value=1, other=1, __name__="theirs")
    patch = Patch("it", lambda: [(module, "other", 2), (module, "value", 2)]).apply()
    module.value = 3
    with pytest.raises(RuntimeError, match=r"theirs\.value was replaced again"):
        patch.undo()
    assert (module.other, module.value) == (2, 3)
    module.value = 2
    patch.undo()
    assert (module.other, module.value) == (1, 1)


def test_holders_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    value = object()
    for name in ("some", "some.inner", "something", "other"):
        module = ModuleType(name)
        module.held = module.again = value  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "some.absent", None)  # type: ignore[arg-type]
    found = [(module.__name__, name) for module, name in holders(("some",), value)]
    inner = [("some.inner", "held"), ("some.inner", "again")]
    assert sorted(found) == sorted([("some", "held"), ("some", "again"), *inner])


def test_versions() -> None:
    assert check_version("pytest", (pytest.__version__,)) == pytest.__version__
    with pytest.raises(RuntimeError, match=r"pytest .* is not supported.*0\.1 or 0\.2"):
        check_version("pytest", ("0.1", "0.2"))
    with pytest.raises(RuntimeError, match=r"no-such-thing is not installed; install 1\.0"):
        check_version("no-such-thing", ("1.0",))
