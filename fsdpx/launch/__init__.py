"""The command-line commands of fsdpx. The package itself is callable: `fsdpx.launch(train, ranks=4)` calls
`fsdpx.launch.python_api.launch`."""

import sys
from types import ModuleType
from typing import Any


class _Launch(ModuleType):
    """Module type of this package. It makes the package callable, because the package and the public function
    `fsdpx.launch` have the same name."""

    def __call__(self, what: Any, *args: Any, **options: Any) -> Any:
        from fsdpx.launch.python_api import launch

        return launch(what, *args, **options)


sys.modules[__name__].__class__ = _Launch
