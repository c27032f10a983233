"""The one place that knows the version; and those of installed packages."""

__version__ = "0.1.0"


def get_version(package: str) -> str:
    """The version of an installed package, "" of any other."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
