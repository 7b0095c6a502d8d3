"""What a reader raises: the file, what was found in it, and what to do."""


class DataError(ValueError):
    """A sample cannot be used. Raised on every rank of the mesh, before any of them has used a part of it."""


class DataWarning(UserWarning):
    """The data can be used, but something about them is worth knowing (told once)."""
