"""The errors of the runtime."""


class RuntimeFileError(RuntimeError):
    """The base class of every error that the runtime raises on purpose."""


class FileError(RuntimeFileError):
    """A file is damaged, truncated, of another format version, or not an exported function."""


class MachineError(RuntimeFileError):
    """The file is intact, but this processor or the installed TVM cannot run it."""


class ArgumentError(RuntimeFileError, TypeError):
    """An argument has another shape or dtype than the exported function takes."""
