"""The error tree: what a handler of builtins, or of our base classes, catches."""

from __future__ import annotations

import inspect
import pickle

import pytest

from dagster_resilient import errors

BUILTINS = {
    "ConfigurationError": ValueError,
    "StorageError": OSError,
    "ObjectNotFoundError": FileNotFoundError,
    "ObjectExistsError": FileExistsError,
    "VersionConflictError": OSError,
    "StoragePermissionError": PermissionError,
    "StoreUnavailableError": ConnectionError,
    "CircuitOpenError": ConnectionError,
    "IntegrityError": ValueError,
    "SchemaVersionError": ValueError,
    "UnsupportedValueError": TypeError,
    "ValueNotFoundError": LookupError,
    "LaunchError": RuntimeError,
    "PreemptedError": RuntimeError,
    "OwnershipError": RuntimeError,
    "TaskHeldError": RuntimeError,
    "FencedError": RuntimeError,
}


def test_the_tree_is_complete() -> None:
    """Every error of the module is one of the tree, and the tree in the module's docstring shows it."""
    found = {name for name, item in inspect.getmembers(errors, inspect.isclass) if item.__module__ == errors.__name__}
    assert found == {"ResilientError", *BUILTINS}
    assert all(name in (errors.__doc__ or "") for name in found)


@pytest.mark.parametrize(("name", "builtin"), BUILTINS.items())
def test_each_error_is_ours_and_the_builtin_that_fits(name: str, builtin: type[Exception]) -> None:
    """Code that does not know this library still handles the error."""
    kind = getattr(errors, name)
    assert issubclass(kind, errors.ResilientError)
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("name", ["StorageError", "ObjectNotFoundError", "ObjectExistsError", "StoreUnavailableError"])
def test_a_storage_error_shows_its_message_and_carries_store_and_key(name: str) -> None:
    """The text is the message alone; store and key can be read from it."""
    error = getattr(errors, name)("No object at s3://b/k.", store="s3://b", key="k")
    assert str(error) == "No object at s3://b/k."
    assert (error.store, error.key) == ("s3://b", "k")


@pytest.mark.parametrize("name", ["StorageError", "ObjectNotFoundError", "StoragePermissionError"])
def test_a_storage_error_passes_between_processes(name: str) -> None:
    """A pool worker's error arrives in the parent with all that it carried."""
    error = pickle.loads(pickle.dumps(getattr(errors, name)("Gone.", store="s3://b", key="k")))
    assert type(error) is getattr(errors, name)
    assert (str(error), error.store, error.key) == ("Gone.", "s3://b", "k")


def test_unavailable_is_not_absent() -> None:
    """A handler of "not found" never catches "the store did not answer" or "permission denied"."""
    for name in ("StoreUnavailableError", "StoragePermissionError", "IntegrityError"):
        assert not issubclass(getattr(errors, name), (FileNotFoundError, LookupError))
