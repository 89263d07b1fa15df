"""The errors of dagster_resilient, one tree.

Each also inherits the builtin that a caller would expect, so that code which does not know us still handles it::

    ResilientError (Exception)
    ├── ConfigurationError (ValueError)       a URL, option or definition that cannot work; nothing was written
    ├── StorageError (OSError)                the object store did not do what was asked
    │   ├── ObjectNotFoundError (FileNotFoundError)
    │   ├── ObjectExistsError (FileExistsError)    a create-if-absent met an object
    │   ├── VersionConflictError                   a replace-if-unchanged met another version
    │   ├── StoragePermissionError (PermissionError)   never read as "not there"
    │   └── StoreUnavailableError (ConnectionError)    retries are used up; the store may come back
    │       └── CircuitOpenError               not even asked: it has not answered for a while
    ├── IntegrityError (ValueError)           stored bytes differ from what their manifest says
    ├── SchemaVersionError (IntegrityError)   written by a newer version of this library
    ├── UnsupportedValueError (TypeError)     a value that cannot be stored exactly; nothing was written
    ├── ValueNotFoundError (LookupError)      an asset partition or checkpoint that was never committed
    ├── PreemptedError (RuntimeError)         the process was told to leave; what is done is saved
    ├── LaunchError (RuntimeError)            the webserver did not launch a re-execution now
    └── OwnershipError (RuntimeError)         who may write
        ├── TaskHeldError                     a live owner holds the task
        └── FencedError                       this attempt was superseded: stop, its work is being done elsewhere
"""


class ResilientError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigurationError(ResilientError, ValueError):
    """A URL, an option or a definition that cannot work. Raised before anything is written or computed."""


class StorageError(ResilientError, OSError):
    """The object store did not do what was asked.

    Attributes:
        store: URL of the store, without credentials.
        key: Key of the object, or None where the whole store is meant.
    """

    def __init__(self, message: str, *, store: str | None = None, key: str | None = None) -> None:
        super().__init__(message)
        self.store = store
        self.key = key

    def __str__(self) -> str:
        """The message alone: OSError would print a tuple where it holds two arguments."""
        return str(self.args[0])


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """No object has this key."""


class ObjectExistsError(StorageError, FileExistsError):
    """A create-if-absent met an object that somebody else wrote."""


class VersionConflictError(StorageError):
    """A replace-if-unchanged met an object that was changed or deleted meanwhile."""


class StoragePermissionError(StorageError, PermissionError):
    """The store refused the credentials or the operation. It says nothing about what is stored."""


class StoreUnavailableError(StorageError, ConnectionError):
    """The store did not answer within all retries. What it holds is unknown until it answers."""


class CircuitOpenError(StoreUnavailableError):
    """The store was not asked: it did not answer a moment ago, and this caller cannot wait until it is probed again."""


class IntegrityError(ResilientError, ValueError):
    """Stored bytes are not the bytes that their manifest lists."""


class SchemaVersionError(IntegrityError):
    """A record was written by a newer version of this library, which this one must not interpret."""


class UnsupportedValueError(ResilientError, TypeError):
    """A value that could not be stored so that it comes back equal. Names the path or column; nothing was written."""


class ValueNotFoundError(ResilientError, LookupError):
    """An asset partition or a checkpoint that was never committed."""


class PreemptedError(ResilientError, RuntimeError):
    """The process was told to leave (SIGTERM), and did so between two steps or partitions. The next try goes on there.

    The message says what is saved. Let it pass: it ends the step, and recovery starts the next try at once.
    """


class LaunchError(ResilientError, RuntimeError):
    """Recovery could not launch a re-execution now: the webserver does not answer. The next tick tries again."""


class OwnershipError(ResilientError, RuntimeError):
    """The writer does not, or no longer, own what it wants to write."""


class TaskHeldError(OwnershipError):
    """Another live attempt owns the task. The message names the owner."""


class FencedError(OwnershipError):
    """This attempt was superseded by a newer one, or its run was fenced. Its writes are refused for ever; stop."""
