"""Types of options whose values are names. The stub file next to this module declares these names for type checkers and
editors.

At run time each type is `str`, because other packages can add names (`fsdpx.core.base.extensions`). The function that
looks up a name knows all names, so it can raise a more helpful error than a type checker.
"""

from typing import Any

Backend = CodecName = Device = DtypeName = PrecisionName = ScheduleName = SequenceMode = Strategy = WeightsChoice = str
ForeignModule = RuntimeArgs = GenerateArgs = Any
