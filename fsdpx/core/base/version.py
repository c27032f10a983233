"""The version of fsdpx, and the versions of installed packages."""

__version__ = "0.1.0"


def get_package_version(package: str) -> str:
    """Return the version of an installed package. Return "" if the package is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
